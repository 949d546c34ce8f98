"""The process's limit of open files and sockets (RLIMIT_NOFILE)."""
from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Raises the soft limit to the hard one: the soft one that a shell sets is low for the sake of old programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:      # macOS has no number that means all
        log.info("the limit of %d open files stays: %s", soft, error)
