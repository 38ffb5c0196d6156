"""The cut of parameters into fragments, and copying between parameters and fragments."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.fragments import FragmentLayout, cut, gather_fragment, load_fragment, shift_fragment

shape = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
models = st.lists(shape, min_size=1, max_size=8).map(
    lambda shapes: {f"layer{index}": shape for index, shape in enumerate(shapes)}
)


@st.composite
def layouts(draw: st.DrawFn) -> FragmentLayout:
    shapes = draw(models)
    elements = sum(math.prod(shape) for shape in shapes.values())
    return cut(shapes, draw(st.integers(1, min(elements, 9))))


def numbered(layout: FragmentLayout) -> dict[str, torch.Tensor]:
    """Parameters whose elements are 0, 1, 2 and so on, in the layout's order."""
    everything = torch.arange(layout.num_elements, dtype=torch.float32)
    sizes = [math.prod(shape) for shape in layout.shapes]
    pieces = everything.split(sizes)
    return {
        name: piece.clone().reshape(shape)
        for name, piece, shape in zip(layout.names, pieces, layout.shapes, strict=True)
    }


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameter.reshape(-1).float() for parameter in parameters.values()])


@given(layouts())
def test_every_element_lies_in_exactly_one_segment_of_one_fragment(layout: FragmentLayout) -> None:
    seen = []
    for fragment in range(layout.num_fragments):
        covered = 0
        for segment in layout.segments(fragment):
            assert segment.fragment_start == covered
            covered += segment.length
            first = segment.tensor_start
            seen += [(segment.name, element) for element in range(first, first + segment.length)]
        assert covered == layout.size(fragment) > 0
    everything = [
        (name, element)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
        for element in range(math.prod(shape))
    ]
    assert seen == everything


@given(shapes=models, data=st.data())
def test_fragments_are_of_about_equal_size(shapes: dict[str, tuple[int, ...]], data: st.DataObject) -> None:
    elements = sum(math.prod(shape) for shape in shapes.values())
    fragments = data.draw(st.integers(1, elements))
    layout = cut(shapes, fragments)
    ideal = elements / fragments
    for fragment in range(fragments):
        assert 0.5 * ideal - 1 <= layout.size(fragment) <= 1.5 * ideal + 1


def test_a_cut_moves_to_a_tensor_border_that_is_near() -> None:
    assert cut({"a": (90,), "b": (110,)}, 2).bounds == (0, 90, 200)
    assert cut({"a": (10,), "b": (190,)}, 2).bounds == (0, 100, 200)


def test_a_model_smaller_than_the_number_of_fragments_is_refused() -> None:
    with pytest.raises(ValueError, match="3 parameters cannot be cut into 4 fragments"):
        cut({"a": (3,)}, 4)


@given(layouts())
def test_gathering_all_fragments_gives_all_parameters_in_order(layout: FragmentLayout) -> None:
    out = torch.full((layout.num_elements,), -1.0)
    parameters = numbered(layout)
    for fragment in range(layout.num_fragments):
        gather_fragment(parameters, layout, fragment, out[layout.slice(fragment)])
    assert torch.equal(out, torch.arange(layout.num_elements, dtype=torch.float32))


@given(layout=layouts(), data=st.data())
def test_loading_a_fragment_changes_it_and_nothing_else(layout: FragmentLayout, data: st.DataObject) -> None:
    fragment = data.draw(st.integers(0, layout.num_fragments - 1))
    parameters = numbered(layout)
    load_fragment(parameters, layout, fragment, -1.0 - torch.arange(layout.size(fragment), dtype=torch.float32))
    expected = torch.arange(layout.num_elements, dtype=torch.float32)
    expected[layout.slice(fragment)] = -1.0 - torch.arange(layout.size(fragment), dtype=torch.float32)
    assert torch.equal(flat(parameters), expected)


@given(layout=layouts(), data=st.data())
def test_shifting_moves_a_fragment_by_new_base_minus_reference(layout: FragmentLayout, data: st.DataObject) -> None:
    fragment = data.draw(st.integers(0, layout.num_fragments - 1))
    parameters = numbered(layout)
    base, reference = torch.full((layout.size(fragment),), 100.0), torch.ones(layout.size(fragment))
    shift_fragment(parameters, layout, fragment, base, reference)
    expected = torch.arange(layout.num_elements, dtype=torch.float32)
    expected[layout.slice(fragment)] += 99.0
    assert torch.equal(flat(parameters), expected)
    assert torch.equal(base, torch.full_like(base, 100.0)) and torch.equal(reference, torch.ones_like(reference))


def test_shifting_onto_a_base_from_where_we_stand_gives_exactly_that_base() -> None:
    layout = cut({"a": (7,)}, 1)
    parameters = {"a": torch.nn.Parameter(torch.rand(7))}
    base = torch.rand(7)
    shift_fragment(parameters, layout, 0, base, parameters["a"].detach().clone())
    assert torch.equal(parameters["a"].detach(), base)


def test_half_precision_parameters_are_gathered_as_float32_and_shifted_in_it() -> None:
    layout = cut({"a": (4,)}, 1)
    parameters = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)}
    out = torch.zeros(4)
    gather_fragment(parameters, layout, 0, out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    shift_fragment(parameters, layout, 0, torch.full((4,), 0.5), torch.ones(4))
    assert parameters["a"].dtype == torch.bfloat16
    assert parameters["a"].tolist() == [0.5, 1.5, 2.5, 3.5]


def test_parameters_that_are_not_contiguous_are_written_too() -> None:
    layout = cut({"a": (2, 3)}, 2)
    parameters = {"a": torch.nn.Parameter(torch.zeros(3, 2).t())}
    assert not parameters["a"].is_contiguous()
    for fragment in range(2):
        load_fragment(parameters, layout, fragment, torch.tensor([1.0, 2.0, 3.0]) + 3 * fragment)
    assert parameters["a"].tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    shift_fragment(parameters, layout, 1, torch.ones(3), torch.zeros(3))
    assert parameters["a"].tolist() == [[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]]


def test_parameters_that_take_gradients_are_written_without_touching_autograd() -> None:
    layout = cut({"a": (3,)}, 1)
    parameters = {"a": torch.nn.Parameter(torch.zeros(3))}
    load_fragment(parameters, layout, 0, torch.ones(3))
    shift_fragment(parameters, layout, 0, torch.ones(3), torch.zeros(3))
    assert parameters["a"].requires_grad and parameters["a"].grad_fn is None
