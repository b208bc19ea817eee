"""A proxy before the API server that kills its clients at a chosen writing request, fails or holds requests, answers
a watch with 410, and remembers who asked for what.

Clients talk plain HTTP to it; it passes everything on. helm sends no token over plain HTTP, so the proxy adds it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import aiohttp
from aiohttp import web
from sojourn.operator.kube.access import Access, _tls

Side = Literal["before", "after"]
_HOP = {"host", "connection", "transfer-encoding", "content-length", "accept-encoding"}


@dataclass
class Trap:
    """Kills at the k-th write (from 1) of the clients that it watches, before or after the server has seen it.

    Attributes:
        agent: start of the User-Agent of the clients whose writes are counted; empty for all.
        kill: what is done then.
    """

    at: int
    side: Side
    kill: Callable[[], None]
    agent: str = ""
    seen: int = 0
    sprung: bool = False

    def counts(self, request: web.Request) -> bool:
        """Whether this is the write to kill at."""
        if not is_write(request) or not request.headers.get("User-Agent", "").startswith(self.agent):
            return False
        self.seen += 1
        return self.seen == self.at


class Right(NamedTuple):
    """One permission: API group, resource with its subresource, verb."""

    group: str
    resource: str
    verb: str


@dataclass
class Proxy:
    """The proxy while it runs."""

    token: str = ""
    port: int = 0
    trap: Trap | None = None
    # Plural of a resource whose watches are cut and then answered with 410 Gone.
    gone: str = ""
    cut: set[asyncio.Task[None]] = field(default_factory=set)
    answered_gone: int = 0
    # Status with which a request is answered instead of by the server; 0 lets it through.
    fails: Callable[[web.Request], int] = lambda request: 0
    # Requests that wait until `release` is set.
    holds: Callable[[web.Request], bool] = lambda request: False
    held: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    # What was asked for, in the words of RBAC.
    rights: set[Right] = field(default_factory=set)

    @property
    def server(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def proxy(access: Access, token: str) -> AsyncIterator[Proxy]:
    """A proxy before the API server for the bearer of a token."""
    state = Proxy(token)
    connector = aiohttp.TCPConnector(limit=0, ssl=_tls(access))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as upstream:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await _handle(state, upstream, access.server, request)

        application = web.Application(client_max_size=64 * 2**20)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        state.port = runner.addresses[0][1]
        try:
            yield state
        finally:
            await runner.cleanup()


async def _handle(
    state: Proxy, upstream: aiohttp.ClientSession, server: str, request: web.Request
) -> web.StreamResponse:
    if state.gone and "watch" in request.query and request.path.endswith(f"/{state.gone}"):
        state.answered_gone += 1
        # As the API server says it: an event of a stream that began well.
        expired = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
        return web.json_response({"type": "ERROR", "object": expired | {"message": "too old resource version"}})
    if code := state.fails(request):
        return web.json_response({"kind": "Status", "message": "the proxy fails", "code": code}, status=code)
    if state.holds(request):
        state.held.set()
        await state.release.wait()
    trap = state.trap
    hit = trap is not None and not trap.sprung and trap.counts(request)
    if trap and hit and trap.side == "before":
        _spring(trap)
        raise web.HTTPServiceUnavailable
    headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
    headers.setdefault("Authorization", f"Bearer {state.token}")
    body = await request.read()
    async with upstream.request(
        request.method, server + str(request.rel_url), data=body or None, headers=headers
    ) as answer:
        state.rights |= rights_of(request, answer.status)
        if trap and hit:
            await answer.read()
            _spring(trap)
            raise web.HTTPServiceUnavailable
        return await _pass_on(state, request, answer)


async def _pass_on(state: Proxy, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
    passed = web.StreamResponse(status=answer.status, headers=headers)
    await passed.prepare(request)
    reading = asyncio.ensure_future(_copy(answer, passed))
    if "watch" in request.query:
        state.cut.add(reading)
        reading.add_done_callback(state.cut.discard)
    await asyncio.wait([reading])
    return passed


async def _copy(answer: aiohttp.ClientResponse, passed: web.StreamResponse) -> None:
    async for chunk in answer.content.iter_any():
        await passed.write(chunk)
    await passed.write_eof()


def is_write(request: web.Request) -> bool:
    return request.method not in ("GET", "HEAD") and "dryRun" not in request.query


def rights_of(request: web.Request, status: int) -> set[Right]:
    """What an answered request needed the right to."""
    parts = request.path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
    rest = rest[2:] if rest[:1] == ["namespaces"] and len(rest) > 2 else rest
    if not rest or status in (403, 404, 405):
        return set()
    resource, named = "/".join(rest[::2]), len(rest) > 1
    verb = {
        "GET": "get" if named else "watch" if "watch" in request.query else "list",
        "POST": "create",
        "PUT": "update",
        "PATCH": "patch",
        "DELETE": "delete",
    }[request.method]
    # Server-side apply of something new needs both.
    made = {Right(group, resource, "create")} if request.method == "PATCH" and status == 201 else set()
    return {Right(group, resource, verb), *made}


def _spring(trap: Trap) -> None:
    trap.sprung = True
    trap.kill()


def kill_children(pid: int, name: str) -> None:
    """SIGKILL to the children of a process that run a program."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):  # gone in between
                if Path(f"/proc/{child}/comm").read_text().strip() == name:
                    os.kill(int(child), signal.SIGKILL)
