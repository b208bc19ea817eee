"""Shows a running request on a terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from sojourn.v1 import inference_pb2 as pb

STAGE_NAMES = {
    pb.STAGE_QUEUED: "waiting",
    pb.STAGE_PREPARE: "prepare",
    pb.STAGE_TEXT_ENCODE: "text encode",
    pb.STAGE_VAE_ENCODE: "vae encode",
    pb.STAGE_DENOISE: "denoise",
    pb.STAGE_DECODE: "decode",
    pb.STAGE_ENCODE_OUTPUT: "encode output",
}


class ProgressView:
    """One line a stage, with a bar where there are steps; a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def show(self, progress: pb.Progress) -> None:
        """Takes in one message."""
        if progress.step == 0:
            self._begin(progress)
        elif self._task is not None:
            note = f"{progress.seconds_per_step:.3g} s/step, {progress.eta_seconds:.1f} s left"
            self._progress.update(self._task, completed=progress.step, note=note)

    def _begin(self, progress: pb.Progress) -> None:
        self._finish()
        name = STAGE_NAMES.get(progress.stage, "?")
        self._task = self._progress.add_task(name, total=progress.steps or 1, note="")

    def _finish(self) -> None:
        if self._task is not None:
            task = self._progress.tasks[self._task]
            self._progress.update(self._task, completed=task.total)
            self._progress.stop_task(self._task)
