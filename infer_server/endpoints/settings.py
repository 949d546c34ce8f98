"""Log and trace settings that clients may read and change while the server runs.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_logging.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md
"""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from infer_server.errors import InvalidRequestError, NotServedError, ServeError
from infer_server.observing import access_log
from infer_server.observing.traces import Tracer
from infer_server.protos import inference
from infer_server.repository.repository import Repository

_FORMATS = ("default", "ISO8601")
# Loggers of this project: other libraries log every request to a store. __main__: this server as `python -m`.
_INFO_LOGGERS = ("infer_server", "__main__")


@dataclass
class LogSettings:
    """Log settings of the protocol, and the filter of log records that implements them."""
    log_file: str = ""                      # "": stderr; set by the command line only
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0              # above 0: debug records, and info records of libraries
    log_format: str = "default"             # both formats write times as ISO 8601

    def install(self) -> None:
        """Take the level of the root logger, and add the filter to its handlers."""
        root = logging.getLogger()
        self.log_verbose_level = int(root.level <= logging.DEBUG)
        self.log_info = root.level <= logging.INFO
        self.log_warning = root.level <= logging.WARNING
        for handler in root.handlers:
            handler.addFilter(self.writes)

    def writes(self, record: logging.LogRecord) -> bool:
        if record.name == access_log.log.name:          # enabled by an option of its own
            return True
        if record.levelno >= logging.ERROR:
            return self.log_error
        if record.levelno >= logging.WARNING:
            return self.log_warning
        is_info = record.levelno >= logging.INFO and record.name.partition(".")[0] in _INFO_LOGGERS
        return self.log_info if is_info else self.log_verbose_level > 0

    def update(self, name: str, value: Any) -> None:
        """Change a setting. Raises NotServedError, InvalidRequestError."""
        if name == "log_file":
            raise NotServedError("log file location can not be updated through network protocol")
        if name not in vars(self):
            raise InvalidRequestError(f"there is no log setting '{name}'; there are {', '.join(vars(self))}")
        if type(value) is not type(getattr(self, name)):
            raise InvalidRequestError(f"expect {type(getattr(self, name)).__name__} for '{name}'")
        if name == "log_format" and value not in _FORMATS:
            raise InvalidRequestError(f"invalid argument for log_format, got: {value}")
        setattr(self, name, value)
        logging.getLogger().setLevel(self._least())

    def _least(self) -> int:
        """Return the lowest level of records that may be written."""
        levels = ((logging.DEBUG, self.log_verbose_level), (logging.INFO, self.log_info),
                  (logging.WARNING, self.log_warning))
        return next((level for level, written in levels if written), logging.ERROR)


class SettingsService:
    """Settings calls of the protocol: one coroutine for each, of its name. They raise ServeErrors."""

    def __init__(self, repository: Repository, log: LogSettings, tracer: Tracer) -> None:
        self._repository = repository
        self._log, self._tracer = log, tracer

    async def LogSettings(self, request: inference.LogSettingsRequest) -> inference.LogSettingsResponse:
        for name, setting in request.settings.items():
            choice = setting.WhichOneof("parameter_choice")
            if choice:
                self._log.update(name, getattr(setting, choice))
        response = inference.LogSettingsResponse()
        for name, value in vars(self._log).items():
            field = {bool: "bool_param", int: "uint32_param"}.get(type(value), "string_param")
            setattr(response.settings[name], field, value)
        return response

    async def TraceSetting(self, request: inference.TraceSettingRequest) -> inference.TraceSettingResponse:
        if model := request.model_name:
            try:
                self._repository.find(model)
            except ServeError as error:
                raise InvalidRequestError(f"Request for unknown model : {model}; {error}") from error
        if request.settings:
            self._tracer.update(model, {
                name: list(setting.value) for name, setting in request.settings.items()})
        response = inference.TraceSettingResponse()
        for name, values in self._tracer.settings_of(model).items():
            response.settings[name].value.extend(values)
        return response
