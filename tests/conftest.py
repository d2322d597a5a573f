"""Settings for all tests."""

import pytest

# Asserts in the shared harness read as well as those in test files.
pytest.register_assert_rewrite("parity")
