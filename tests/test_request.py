import pytest

from faser import SamplingParams
from faser.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 65),
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
