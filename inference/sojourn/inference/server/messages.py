"""Our types → messages of the contract."""

from collections.abc import Iterable, Mapping, Sequence

from sojourn.inference.encoding import Artifact
from sojourn.inference.requests import GenerationRequest, QualityTier
from sojourn.inference.server.run import ClipDone, Moved
from sojourn.inference.server.validation import OUTPUT_FORMATS, QUALITY_TIERS, WORKFLOWS
from sojourn.inference.watch import Stage
from sojourn.v1 import inference_pb2 as pb

# A chunk's message stays below 1 MiB with its other fields.
CHUNK_BYTES = 2**20 - 4096

WORKFLOW_NUMBERS = {workflow: number for number, workflow in WORKFLOWS.items()}
# UNSPECIFIED stands for a default and comes first; the later, explicit number overwrites it.
TIER_NUMBERS = {tier: number for number, tier in QUALITY_TIERS.items()}
FORMAT_NUMBERS = {output: number for number, output in OUTPUT_FORMATS.items()}
STAGE_NUMBERS = {stage: pb.Stage.Value(f"STAGE_{stage.upper()}") for stage in Stage}


def parameters(request: GenerationRequest, *, frames_per_second: float) -> pb.ResolvedParameters:
    """Every parameter as it will be used."""
    return pb.ResolvedParameters(
        workflow=WORKFLOW_NUMBERS[request.workflow],
        width=request.width,
        height=request.height,
        frames=request.frames,
        frames_per_second=frames_per_second,
        steps=request.steps,
        flow_shift=request.flow_shift,
        audio_flow_shift=request.audio_flow_shift,
        seeds=request.seeds,
        quality=TIER_NUMBERS[request.quality],
        outputs=[FORMAT_NUMBERS[output] for output in request.outputs],
    )


def progress(moved: Moved) -> pb.GenerateResponse:
    """One begin of a stage, or one step."""
    eta = moved.seconds_per_step * (moved.steps - moved.step)
    message = pb.Progress(
        stage=STAGE_NUMBERS[moved.stage],
        step=moved.step,
        steps=moved.steps,
        seconds_per_step=moved.seconds_per_step,
        eta_seconds=eta,
        clip=moved.clip,
    )
    return pb.GenerateResponse(progress=message)


def queued() -> pb.GenerateResponse:
    """The begin of the wait."""
    return pb.GenerateResponse(progress=pb.Progress(stage=pb.STAGE_QUEUED))


def chunks(artifact: Artifact, *, index: int, clip: int) -> Iterable[pb.GenerateResponse]:
    """The artifact in order, one chunk at a time read from its file; at least one, the last marked."""
    left = artifact.size_bytes
    while True:
        data = artifact.file.read(CHUNK_BYTES)
        if not data and left:
            raise OSError(f"artifact {index} ends {left} bytes early")
        left -= len(data)
        chunk = pb.ArtifactChunk(
            index=index,
            clip=clip,
            format=FORMAT_NUMBERS[artifact.format],
            mime_type=artifact.mime_type,
            data=data,
            last=left <= 0,
        )
        yield pb.GenerateResponse(artifact=chunk)
        if chunk.last:
            return


def clip_summaries(request: GenerationRequest, done: Sequence[ClipDone]) -> list[pb.ClipSummary]:
    """What each clip was made from and into."""
    return [
        pb.ClipSummary(clip=clip.clip, seed=request.seeds[clip.clip], latents_sha256=clip.latents_sha256)
        for clip in done
    ]


def tier_used(done: Sequence[ClipDone]) -> tuple[QualityTier, str]:
    """The lowest tier among the clips of a request, and why it is not what was asked for."""
    tier = min((clip.quality for clip in done), key=list(QualityTier).index)
    return tier, "; ".join(dict.fromkeys(clip.quality_reason for clip in done if clip.quality_reason))


def timings(seconds: Mapping[Stage, float]) -> list[pb.StageTiming]:
    """Stages in their order."""
    return [pb.StageTiming(stage=STAGE_NUMBERS[stage], seconds=value) for stage, value in seconds.items()]
