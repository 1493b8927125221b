"""Logging for every service: stdlib, console or JSON, with the bound role and request id."""

import json
import logging
import sys
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["console", "json"]

role: ContextVar[str] = ContextVar("role", default="")
request_id: ContextVar[str] = ContextVar("request_id", default="")
_BOUND = {"role": role, "request_id": request_id}


class _BindContext(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        for name, variable in _BOUND.items():
            setattr(record, name, variable.get())
        return True


class _ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        bound = " ".join(f"{name}={getattr(record, name)}" for name in _BOUND if getattr(record, name, ""))
        time = self.formatTime(record, "%H:%M:%S")
        line = f"{time} {record.levelname:<7} {record.name}: {record.getMessage()}"
        line = f"{line} [{bound}]" if bound else line
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in _BOUND if getattr(record, name, "")}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(log_format: LogFormat, level: str, service: str) -> None:
    """Send the project's loggers to stderr; vLLM keeps its own handler and its own VLLM_LOGGING_LEVEL."""
    role.set(service)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _ConsoleFormatter())
    handler.addFilter(_BindContext())
    for name in ("lockstep", "prefill_node", "decode_node", "proxy", "kv_transfer"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
