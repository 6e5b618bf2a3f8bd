"""Errors as clients see them, in OpenAI's format: {"error": {"message", "type", "param", "code"}} and an HTTP
status."""

from __future__ import annotations

from typing import Any

from firstlight.errors import FirstlightError


class ApiError(FirstlightError):
    """An answer with an error status.

    param: the request's field that is wrong, if it is one field. code: short and stable, for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        return {
            "error": {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        }


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400: the request is wrong, and would be wrong if it were sent again."""
    return ApiError(400, message, param=param, code=code)


def error_type(status: int) -> str:
    """OpenAI's name for the kind of an error."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
