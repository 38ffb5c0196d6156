"""The run manifest: what is refused, how it is said, and what makes a run's id."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dht_config.errors import ExitCode, ManifestError
from dht_config.keys import MAX_FRAGMENTS, matchmaking_key, matchmaking_prefix
from dht_config.manifest import (
    EXAMPLES,
    MAX_MANIFEST_BYTES,
    RunManifest,
    differing_fields,
    example_manifest,
    fingerprint,
    load_manifest,
    parse_manifest,
    run_id,
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SMALLEST = '[run]\nname = "tiny"\n[task]\nname = "text"\n'


def complaint_about(text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, source="run.toml")
    return caught.value


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_shipped_example_is_a_valid_manifest_of_its_own_name(name: str) -> None:
    manifest = parse_manifest(example_manifest(name), source=name)
    assert manifest.run.name == name
    assert RunManifest.model_validate_json(manifest.canonical_json()) == manifest


def test_the_default_example_is_the_small_byte_model() -> None:
    manifest = parse_manifest(example_manifest("stdlib-text"), source="stdlib-text")
    assert (manifest.run.tick_seconds, manifest.run.fragments) == (1.0, 4)
    assert manifest.averaging.matchmaking_seconds == 1.5
    assert (manifest.inner_optimizer.lr, manifest.inner_optimizer.batch_size) == (3e-3, 8)
    assert (manifest.outer_optimizer.lr, manifest.outer_optimizer.momentum) == (0.7, 0.6)
    assert manifest.model == {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    }


def test_an_unknown_example_is_answered_with_the_close_one() -> None:
    with pytest.raises(ManifestError, match='Did you mean "stdlib-text"'):
        example_manifest("stdlib-txt")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[run]\nnam = "tiny"\n[task]\nname = "text"', ["[run] nam", 'Did you mean "name"']),
        (SMALLEST + "[inner_optimiser]\nlr = 1.0", ["[inner_optimiser]", 'Did you mean "inner_optimizer"']),
        (SMALLEST + '[averaging]\ncompression = "zip"', ["[averaging] compression", "matchmaking_seconds"]),
        ('[task]\nname = "text"', ["[run] is missing"]),
        ('[run]\n[task]\nname = "text"', ["[run] name is missing", "Add name"]),
        ('run = 3\n[task]\nname = "text"', ["run is not a section"]),
        ('[run]\nname = "Two words"\n[task]\nname = "text"', ['name = "Two words"', "lower-case letters"]),
        ('[run]\nname = "a.b"\n[task]\nname = "text"', ['name = "a.b"', "hyphens"]),
        (SMALLEST.replace('"tiny"', '"tiny"\nfragments = 257'), ["fragments = 257", "1 to 256"]),
        (SMALLEST.replace('"tiny"', '"tiny"\nfragments = "4"'), ['fragments = "4"', "integer"]),
        (SMALLEST.replace('"tiny"', '"tiny"\nstart = 2026-01-01T00:00:00'), ["start = ", "offset"]),
        (SMALLEST + "[inner_optimizer]\nlr = nan", ["lr = NaN", "finite"]),
        (SMALLEST + "[inner_optimizer]\nbetas = [0.9]", ["betas = [0.9]", "two numbers"]),
        (SMALLEST + '[inner_optimizer]\nname = "lion"', ['name = "lion"', "'adamw' or 'sgd'"]),
        (SMALLEST + '[inner_optimizer]\nschedule = "cosine"', ["[inner_optimizer]", "decay_samples (0)"]),
        (SMALLEST + "[averaging]\nmatchmaking_seconds = 4.0", ["matchmaking_seconds = 4.0", "below the 4 s"]),
        (SMALLEST + "[model]\nsince = 2026-01-01", ["[model]", "since = ", "strings, numbers"]),
        (SMALLEST + "[data]\nscale = inf", ["[data]", "scale = Infinity", "finite"]),
        (SMALLEST + "[model]\nsize = 99999999999999999999", ["[model]", "size = ", "64 bits"]),
        (SMALLEST + "[model]\nlist = [[[[[1]]]]]", ["[model]", "list = ", "nested"]),
        ("run = [", ["not valid TOML"]),
        ("x = " + "[" * 5000, ["not valid TOML"]),
        ("x = " + "1" * 5000, ["not valid TOML"]),
    ],
)
def test_a_wrong_manifest_is_refused_in_one_line_that_names_source_field_and_remedy(
    text: str, words: list[str]
) -> None:
    error = complaint_about(text)
    assert "run.toml" in error.problem
    assert error.remedy
    assert "\n" not in str(error)
    assert error.exit_code is ExitCode.MANIFEST
    for word in words:
        assert word in str(error)


def test_a_manifest_too_big_for_a_record_is_refused() -> None:
    error = complaint_about(SMALLEST + f'[data]\nfiles = "{"x" * MAX_MANIFEST_BYTES}"')
    assert "too big" in error.problem


def test_a_missing_a_binary_and_an_unreadable_file_are_each_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no manifest at .*nowhere\.toml"):
        load_manifest(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match=r"binary\.toml is not UTF-8"):
        load_manifest(tmp_path / "binary.toml")
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest(tmp_path)


def test_a_manifest_saved_on_windows_reads_the_same(tmp_path: Path) -> None:
    plain, windows = tmp_path / "plain.toml", tmp_path / "windows.toml"
    plain.write_bytes(SMALLEST.encode())
    windows.write_bytes(b"\xef\xbb\xbf" + SMALLEST.replace("\n", "\r\n").encode())
    assert load_manifest(plain) == load_manifest(windows)


def test_the_fingerprint_of_a_known_manifest_never_changes_by_accident() -> None:
    # If this fails, peers of the previous release can no longer meet ours: raise PROTOCOL_VERSION on purpose.
    assert run_id(parse_manifest(SMALLEST, "run.toml"), task_version=1) == "tiny-42629506738a1cf7"


def test_the_fingerprint_covers_all_but_the_network() -> None:
    manifest = parse_manifest(SMALLEST, "run.toml")
    elsewhere = parse_manifest(SMALLEST + '[network]\ninitial_peers = ["/ip4/1.2.3.4"]', "run.toml")
    later = parse_manifest(SMALLEST.replace('"tiny"', '"tiny"\ntick_seconds = 2.0'), "run.toml")
    assert fingerprint(manifest, 1) == fingerprint(elsewhere, 1)
    assert len({fingerprint(manifest, 1), fingerprint(later, 1), fingerprint(manifest, 2)}) == 3


def test_the_same_values_written_differently_are_the_same_run() -> None:
    reordered = (
        '[task]\nname = "text"\n[run]\nstart = 2026-01-01T02:00:00+02:00\nfragments = 4\ntick_seconds = 1\n'
        'name = "tiny"\n'
    )
    assert run_id(parse_manifest(SMALLEST, "a"), 1) == run_id(parse_manifest(reordered, "b"), 1)


def test_ids_and_matchmaking_prefixes_hold_no_dot() -> None:
    identifier = run_id(parse_manifest(SMALLEST, "run.toml"), 1)
    assert re.fullmatch(r"[a-z0-9-]+", identifier)
    assert "." not in matchmaking_prefix(identifier, MAX_FRAGMENTS - 1)
    assert matchmaking_key(identifier, 3) == f"{identifier}-f3.0b"
    with pytest.raises(ValueError, match="fragment must be"):
        matchmaking_prefix(identifier, MAX_FRAGMENTS)


def test_a_joiner_is_told_which_fields_differ() -> None:
    ours = json.loads(parse_manifest(SMALLEST, "a").canonical_json())
    theirs = json.loads(parse_manifest(SMALLEST + "[model]\nsize = 2", "b").canonical_json())
    theirs["run"]["fragments"] = 8
    theirs["network"] = {"initial_peers": ["elsewhere"]}
    assert differing_fields(ours, theirs) == [
        "model.size: ours nothing, theirs 2",
        "run.fragments: ours 4, theirs 8",
    ]
    assert differing_fields(ours, ours) == []


@unhurried
@given(st.text())
def test_any_text_is_a_manifest_or_a_manifest_error(text: str) -> None:
    try:
        parse_manifest(text, source="run.toml")
    except ManifestError as error:
        assert error.problem


# JSON writes these as TOML does; what TOML cannot hold is refused by its parser, which is fine as well.
plain_values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3),
    max_leaves=8,
)


@unhurried
@given(
    st.sampled_from(sorted(RunManifest.model_fields)),
    st.sampled_from(["name", "lr", "betas", "start", "fragments", "initial_peers", "anything"]),
    plain_values,
)
def test_any_value_in_any_field_is_accepted_or_named(section: str, key: str, value: object) -> None:
    table: dict[str, dict[str, object]] = {"run": {"name": "tiny"}, "task": {"name": "text"}}
    table.setdefault(section, {})[key] = value
    lines = []
    for name, fields in table.items():
        lines.append(f"[{name}]")
        lines += [f"{field} = {json.dumps(content, ensure_ascii=False)}" for field, content in fields.items()]
    try:
        manifest = parse_manifest("\n".join(lines), source="run.toml")
    except ManifestError as error:
        assert "run.toml" in error.problem
    else:
        again = RunManifest.model_validate_json(manifest.canonical_json())
        assert again.canonical_json() == manifest.canonical_json()
