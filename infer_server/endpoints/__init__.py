"""Endpoints translate: decode, call, encode, map an error to a status of their protocol. They hold no policy."""
