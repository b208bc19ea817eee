"""What is remembered of the cluster: a listing takes its time, and what happens meanwhile is newer than it."""

import asyncio
from typing import Any

import pytest
from sojourn.operator.cache import Cache, Key
from sojourn.operator.kube.client import CONFIG_MAPS, Kube, Object, Objects, Resource
from sojourn.operator.records import RecordBook

KIND = "DiffusionService"
DEMO = Key(KIND, "studio", "demo")


def item(version: int, uid: str = "a", name: str = "demo") -> Object:
    return {"metadata": {"namespace": "studio", "name": name, "uid": uid, "resourceVersion": str(version)}}


def listed(cache: Cache, items: Objects, known: dict[Any, Object], *, deployments: bool) -> None:
    if deployments:
        cache.replace_deployments(items, known)
    else:
        cache.replace(KIND, items, known)


def store(cache: Cache, *, deployments: bool) -> dict[Any, Object]:
    return cache.deployments if deployments else cache.resources


@pytest.fixture(params=[False, True], ids=["resources", "deployments"])
def deployments(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def put(cache: Cache, one: Object, *, deployments: bool) -> None:
    cache.put_deployment(one) if deployments else cache.put(DEMO, one)


def test_what_a_listing_lacks_is_gone(deployments: bool) -> None:
    cache = Cache()
    put(cache, item(5), deployments=deployments)
    listed(cache, [], dict(store(cache, deployments=deployments)), deployments=deployments)
    assert store(cache, deployments=deployments) == {}


def test_what_was_made_while_the_listing_was_on_its_way_stays(deployments: bool) -> None:
    cache = Cache()
    known = dict(store(cache, deployments=deployments))
    put(cache, item(9), deployments=deployments)
    listed(cache, [], known, deployments=deployments)
    assert list(store(cache, deployments=deployments).values()) == [item(9)]


def test_what_was_made_anew_under_the_same_name_stays(deployments: bool) -> None:
    cache = Cache()
    put(cache, item(5), deployments=deployments)
    known = dict(store(cache, deployments=deployments))
    put(cache, item(9, uid="b"), deployments=deployments)
    listed(cache, [], known, deployments=deployments)
    assert list(store(cache, deployments=deployments).values()) == [item(9, uid="b")]


def test_what_ended_while_the_listing_was_on_its_way_does_not_come_back(deployments: bool) -> None:
    cache = Cache()
    put(cache, item(5), deployments=deployments)
    known = dict(store(cache, deployments=deployments))
    store(cache, deployments=deployments).clear()
    listed(cache, [item(5)], known, deployments=deployments)
    assert store(cache, deployments=deployments) == {}


def test_an_older_listing_replaces_nothing_newer(deployments: bool) -> None:
    cache = Cache()
    put(cache, item(9), deployments=deployments)
    listed(cache, [item(5)], dict(store(cache, deployments=deployments)), deployments=deployments)
    assert list(store(cache, deployments=deployments).values()) == [item(9)]


class Slow(Kube):
    """Answers a listing only when it is let, with what was true before."""

    def wrap(self, kube: Kube) -> "Slow":
        self.answered, self.let = asyncio.Event(), asyncio.Event()
        self.asked = 0
        self._session, self._server, self._on_write = kube._session, kube._server, kube._on_write
        return self

    async def list_metadata(self, resource: Resource, namespace: str | None = None, *, labels: str = "") -> Objects:
        found = await super().list_metadata(resource, namespace, labels=labels)
        self.asked += 1
        self.answered.set()
        await self.let.wait()
        return found


def record(namespace: str, release: str, revision: int, state: str = "deployed") -> Object:
    labels = {"owner": "helm", "name": release, "version": str(revision), "status": state}
    return {"metadata": {"name": f"{release}.v{revision}", "namespace": namespace, "labels": labels}}


async def test_records_that_change_while_all_are_listed_are_read_anew(kube: Kube, namespace: str) -> None:
    slow = Slow.__new__(Slow).wrap(kube)
    book = RecordBook(slow)
    await kube.create(CONFIG_MAPS, record(namespace, "one", 1, "pending-install"))
    await kube.create(CONFIG_MAPS, record(namespace, "other", 1))
    reading = asyncio.create_task(book.read_all((namespace,)))
    await slow.answered.wait()
    # helm ends its work on one release, and a pass looks at it, before the listing arrives.
    await kube.merge(CONFIG_MAPS, namespace, "one.v1", {"metadata": {"labels": {"status": "deployed"}}})
    book.forget(namespace, "one")
    slow.let.set()
    await reading
    assert [found.status for found in await book.of(namespace, "one")] == ["deployed"]
    assert [found.status for found in await book.of(namespace, "other")] == ["deployed"]


async def test_a_release_that_no_listing_showed_is_not_asked_for(kube: Kube, namespace: str) -> None:
    slow = Slow.__new__(Slow).wrap(kube)
    slow.let.set()
    book = RecordBook(slow)
    assert await book.of(namespace, "new") == ()
    assert slow.asked == 1, "before everything was listed nothing is known to be missing"
    await book.read_all((namespace,))
    assert await book.of(namespace, "another") == ()
    assert slow.asked == 2
    # helm said that there is one after all.
    await kube.create(CONFIG_MAPS, record(namespace, "another", 1))
    book.forget(namespace, "another")
    assert len(await book.of(namespace, "another")) == 1
