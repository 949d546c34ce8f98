"""The compiler's version: part of every cache key, so that what an older compiler made is never taken for new."""

COMPILER_VERSION = "25"
