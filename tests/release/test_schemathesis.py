"""What openapi.json says, tried on a running service with thousands of made-up requests."""

import os

from helpers.running import BIN, LIMIT, ROOT, run


def test_schemathesis_finds_nothing(gardening, tmp_path, cache):
    header = f"Authorization: {gardening.headers['Authorization']}"
    settings = ROOT / "tests/release/schemathesis.toml"
    configured = [BIN / "schemathesis", "--config-file", settings]
    command = ["run", f"{gardening.url}/openapi.json", "--checks=all", "-H", header]
    # Where it keeps its table of Unicode, which takes eight seconds to make.
    table = {"HYPOTHESIS_STORAGE_DIRECTORY": cache.mkdir("hypothesis")}
    ended = run(
        *configured, *command, folder=tmp_path, environment=os.environ | table, limit=10 * LIMIT
    )
    assert "No issues found" in ended.stdout
