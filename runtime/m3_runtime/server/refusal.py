"""What the server refuses, in the shape of OpenAI's errors."""

from typing import Any, Final

from pydantic import ValidationError

from m3_runtime.errors import ContextError, InputError, M3Error
from m3_runtime.scheduler import BusyError, ClosedError

_SHOWN: Final = 120  # characters of a value


class RefusalError(Exception):
    """An answer that is no 2xx."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """status: of HTTP. message: one line. param: the field of the request that is to blame."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status == 401:
            kind = "authentication_error"
        elif self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def of_error(error: Exception, *, retry_after: int = 1) -> RefusalError:
    """The refusal for an error of the program; one that it does not know is a 500."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(retry_after)}
        return RefusalError(429, f"too many requests: {error}", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, ClosedError):
        return RefusalError(503, str(error), code="shutting_down")
    if isinstance(error, ContextError):
        return RefusalError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InputError):
        return RefusalError(400, str(error))
    if isinstance(error, M3Error):
        return RefusalError(500, str(error), code="model_error")
    return RefusalError(500, f"internal error, please report: {type(error).__name__}", code="internal_error")


def of_validation(error: ValidationError) -> RefusalError:
    """What is wrong first."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return RefusalError(400, f"the body is no valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = _field(first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return RefusalError(400, f"unrecognized request argument: {param}", param=param, code="unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return RefusalError(400, f"{param}: is missing", param=param, code="missing_required_parameter")
    shown = repr(first["input"])
    found = "" if len(shown) > _SHOWN or first["type"] == "value_error" else f", found {shown}"
    where = "" if param is None else f"{param}: "
    return RefusalError(400, f"{where}{message}{found}", param=param, code="invalid_value")


def _field(steps: tuple[int | str, ...]) -> str:
    """The path of a field, without what pydantic puts in for the member of a union."""
    path: list[str] = []
    for i, step in enumerate(steps):
        is_role = i == 2 and steps[0] == "messages"
        is_type = isinstance(step, str) and ("[" in step or step in ("str", "NamedTool"))
        if not is_role and not is_type:
            path.append(str(step))
    return ".".join(path)
