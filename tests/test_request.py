"""Sampling parameters: checked, frozen, and what follows from them for the engine."""

import pytest

from faser import SamplingParams
from faser.errors import InvalidRequest
from faser.request import check_token_ids, draw_seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "many"),
        ("min_tokens", -1), ("min_tokens", 65),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1),
        ("top_k", -1), ("min_p", 1.5), ("seed", 2**64), ("seed", 1.0), ("stop", [""]), ("stop", 5), ("stop", [5]),
        ("stop_token_ids", [-1]), ("stop_token_ids", 3), ("ignore_eos", 1), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("repetition_penalty", 0.0), ("logprobs", 21), ("logprobs", True),
        ("logit_bias", {1: 101}), ("logit_bias", {"1": 1}), ("logit_bias", [1]), ("max_draft", -1),
    ],
)  # fmt: skip
def test_a_wrong_sampling_parameter_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value})


def test_an_unknown_sampling_parameter_is_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_sampling_parameters_do_not_change_with_what_they_were_made_from():
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[3] = 4.0
    assert params.stop == ("a",)
    assert dict(params.logit_bias) == {1: 2.0}
    assert SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize("fields", [{"stop_token_ids": [3, 61]}, {"logit_bias": {61: 1.0}}])
def test_a_field_that_names_a_token_beyond_the_vocabulary_is_refused_by_name(fields):
    params = SamplingParams(**fields)
    params.check_vocabulary(62)
    (name,) = fields
    with pytest.raises(InvalidRequest, match=f"{name}: 61 is no token id; expected 0 to 60"):
        params.check_vocabulary(61)


def test_a_negative_token_id_is_refused():
    with pytest.raises(InvalidRequest, match="prompt: -1 is no token id"):
        check_token_ids("prompt", [4, -1], 10)


def test_the_end_tokens_of_the_model_stop_the_output_unless_they_are_ignored():
    assert SamplingParams(stop_token_ids=[7]).stop_ids([2, 3]) == {2, 3, 7}
    assert SamplingParams(stop_token_ids=[7], ignore_eos=True).stop_ids([2, 3]) == {7}


def test_a_given_seed_is_a_64_bit_word_and_a_missing_one_is_drawn_anew():
    assert (draw_seed(5), draw_seed(-1)) == (5, 2**64 - 1)
    drawn = {draw_seed(None) for _ in range(4)}
    assert len(drawn) == 4
    assert all(0 <= seed < 2**64 for seed in drawn)
