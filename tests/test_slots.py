"""Per-slot tables: what is written on the host is what the device reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_oracles import CPU, long
from llm_steer.slots import SlotTable

COLUMNS = ("gain", "start", "flag")


@given(
    writes=st.lists(
        st.tuples(st.integers(0, 4), st.dictionaries(st.sampled_from(COLUMNS), st.floats(-1e6, 1e6))),
        min_size=1,
        max_size=20,
    ),
    reads=st.lists(st.integers(0, 5), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_a_read_sees_every_write_before_it(writes, reads):
    """Columns that a write does not name become 0, whatever the slot's previous owner had there."""
    table = SlotTable(COLUMNS, 6, CPU)
    expected = [dict.fromkeys(COLUMNS, 0.0) for _ in range(6)]
    for slot, values in writes:
        table.write(slot, **values)
        expected[slot] = dict.fromkeys(COLUMNS, 0.0) | values
        for name in COLUMNS:
            assert table[name].tolist() == [row[name] for row in expected]
    seen = table.rows(long(*reads))
    assert {name: column.tolist() for name, column in seen.items()} == {
        name: [expected[slot][name] for slot in reads] for name in COLUMNS
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_columns_keep_their_type(dtype):
    table = SlotTable(COLUMNS, 3, CPU, dtype)
    table.write(1, gain=True, flag=1)
    assert table["gain"].dtype == table.rows(long(1))["gain"].dtype == dtype
    assert table["gain"].tolist() == [0, 1, 0]


def test_large_positions_are_exact():
    table = SlotTable(("start",), 2, CPU)
    table.write(0, start=2**31 - 1)
    assert table["start"][0].item() == 2**31 - 1


def test_a_column_that_is_not_there():
    table = SlotTable(COLUMNS, 3, CPU)
    with pytest.raises(KeyError, match="speed"):
        table.write(0, speed=1)
    with pytest.raises(ValueError, match="not in"):
        table["speed"]


def test_what_was_read_does_not_change_afterwards():
    """A forward pass in flight keeps its parameters."""
    table = SlotTable(COLUMNS, 3, CPU)
    table.write(0, gain=1)
    rows = table.rows(long(0))
    table.write(0, gain=2)
    table.flush()
    assert rows["gain"].tolist() == [1]
