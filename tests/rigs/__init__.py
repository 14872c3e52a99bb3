"""What the tests put around the service: its processes, other programs, machines."""

import pytest

# Before they are imported: what fails in them is told as in a test.
pytest.register_assert_rewrite(
    "rigs.conformance", "rigs.machine", "rigs.nginx", "rigs.pgserver", "rigs.running"
)
