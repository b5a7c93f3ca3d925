"""`JSON_ERRORS`: the errors that msgspec raises for invalid JSON."""

import msgspec

# For invalid UTF-8 and deeply nested lists, msgspec does not raise a `DecodeError`.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
