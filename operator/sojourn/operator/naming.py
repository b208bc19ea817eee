"""Names that the operator gives: releases, labels, annotations, the finalizer, field managers."""

from sojourn.operator.resources import GROUP

FINALIZER = f"{GROUP}/release"
# Set by people to anything new: one pass, whatever the digests say.
RECONCILE_AT = f"{GROUP}/reconcile-at"
# Labels of a release record: hash of the manifest that it holds, and hash of what it was rendered from.
DIGEST_LABEL = f"{GROUP}/digest"
INPUTS_LABEL = f"{GROUP}/inputs"
# "pending" until objects that the manifest lacks were looked for; kept in the record, so that it outlives a crash.
SWEEP_LABEL = f"{GROUP}/sweep"
# helm calls itself so and has no switch for it; drift is corrected under the same name.
HELM_MANAGER = "helm"
HANDOVER_MANAGER = "sojourn-handover"
WORKLOAD_SELECTOR = "app.kubernetes.io/name=sojourn-service"
INSTANCE_LABEL = "app.kubernetes.io/instance"

_RELEASE_PREFIX = "dsvc-"


def release_name(service: str) -> str:
    """Name of the release, and of every object in it: at most 53 characters, since a service has at most 48."""
    return f"{_RELEASE_PREFIX}{service}"


def service_name(release: str) -> str | None:
    """The service that a release belongs to; None for a release that is not ours."""
    return release.removeprefix(_RELEASE_PREFIX) if release.startswith(_RELEASE_PREFIX) else None
