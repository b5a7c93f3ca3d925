"""What msgspec raises for bytes that are not the JSON that they should be."""

import msgspec

# Text that is no UTF-8, and lists in lists without end, are no `DecodeError`.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
