"""What the scheduler says to a request that it will not take."""


class RequestRefusedError(Exception):
    """The request can't be served, now or ever; `status` is the HTTP status that says so to a client.

    400: it is malformed or can never fit this engine. 409: its id is already in use.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
