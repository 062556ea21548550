"""Logs for programs: one JSON object a line on standard error, without prompts and answers."""

import datetime
import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    """Writes a record, and what a caller gave as `extra={"fields": ...}`, as one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {"time": when.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        line |= {"logger": record.name, "message": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: str) -> None:
    """Sends the records of jaxinfer and of uvicorn to standard error; uvicorn tells only of trouble."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, least in (("jaxinfer", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(least)
