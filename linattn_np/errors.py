"""What a call is refused with, before anything has run."""


class ContractError(ValueError):
    """An argument does not fit the operator's declaration; raised before anything runs."""


class ContractTypeError(ContractError, TypeError):
    """An argument is of a type, dtype or array library that the operator does not take."""


class NotSupported(ContractError):
    """No backend, or not the one named, can compute this problem; the message gives every reason."""
