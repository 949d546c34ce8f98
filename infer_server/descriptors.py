"""How many files and sockets the process may have open."""
from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Up to what the system allows: the limit that a shell sets is low for the sake of old programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:      # macOS has no number that means all
        log.info("the limit of %d open files stays: %s", soft, error)
