"""The error tree: codes, texts, gRPC status."""

from __future__ import annotations

from pixiu import errors
from pixiu.rpc.status import GRPC_STATUS
from tests.support.builds import COMPILED


def test_every_error_is_drawn_and_has_a_status() -> None:
    for error in errors.all_errors():
        assert error.__name__ in (errors.__doc__ or "") or error.__module__ != errors.__name__
        assert error.code in GRPC_STATUS
        assert error.__doc__ or COMPILED  # there a class that derives from one of Python has none


def test_a_peers_code_becomes_the_same_error_again() -> None:
    refused = errors.error_of_code("OVERLOADED", "slow down", 250)
    assert isinstance(refused, errors.Overloaded)
    assert refused.retry_after_ms == 250
    assert isinstance(errors.error_of_code("DROPPED", "x"), errors.Dropped)
    assert type(errors.error_of_code("FROM_THE_FUTURE", "x")) is errors.RemoteError


def test_what_was_certainly_not_sent_and_what_is_unknown_are_the_languages_own_errors_too() -> None:
    for sure in (errors.NotSent, errors.Unreachable, errors.RegistryUnavailable):
        assert issubclass(sure, errors.Unavailable)
        assert issubclass(sure, ConnectionError)
        assert not issubclass(sure, TimeoutError)
    for unknown in (errors.OutcomeUnknown, errors.Undelivered):
        assert issubclass(unknown, TimeoutError)
        assert not issubclass(unknown, ConnectionError)
    assert issubclass(errors.OutcomeUnknown, errors.Unavailable)
    assert str(errors.NotSent("why")) == "why"
    assert isinstance(errors.error_of_code("UNAVAILABLE", "x"), errors.Unavailable)
    assert isinstance(errors.error_of_code("OUTCOME_UNKNOWN", "x"), TimeoutError)
