"""Errors that are meant for people: each message says what was wrong, with the value, and what to do."""

from __future__ import annotations


class FirstlightError(Exception):
    """Base of every error that Firstlight raises about its input; a bug of ours is never one of these."""


class InputError(FirstlightError, ValueError):
    """A value that was given can't be used; to callers of a function it is a ValueError like any other."""


class CheckpointError(FirstlightError):
    """A checkpoint can't be used: a file is missing, malformed or unsupported. The message names the file."""


class TokenizerError(FirstlightError):
    """Text can't be turned into tokens or back: the checkpoint has no tokenizer, or one of an unknown kind."""


class ChatTemplateError(FirstlightError):
    """A chat can't be rendered: there is no template, the template refused the messages, or it did too much work."""


def quoted(text: str) -> str:
    """Text from an untrusted file, fit for a message: quoted, escaped, and cut if it is long."""
    shown = repr(text)
    return shown if len(shown) <= 200 else shown[:200] + "...'"
