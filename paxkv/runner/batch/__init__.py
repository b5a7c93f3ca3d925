"""Host-side batch state and the packed input of a step."""
