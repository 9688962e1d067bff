"""`TransformerConfig(invariant=True)`: one set of bits for every layout, and what it refuses."""

import pytest

from lamina.models import LayerSpec, Precision, TransformerConfig

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tp_reduction": "native"}, "tp_reduction='native'"),
        ({"precision": Precision(backend="torch-fp8")}, "precision='torch-fp8'"),
        ({"precision": Precision(backend="transformer_engine")}, "precision='transformer_engine'"),
        ({"attention_path": "sdpa"}, "attention_path='sdpa'"),
        ({"tie_embeddings": True}, "tie_embeddings=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_what_has_no_order_of_the_model_is_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=f"invariant=True beside {message}"):
        TransformerConfig(**SHAPE, invariant=True, **setting)
    TransformerConfig(**SHAPE, invariant=False, **setting)


def test_the_layers_of_a_model_share_the_setting():
    with pytest.raises(ValueError, match="invariant cannot be that of one layer"):
        LayerSpec(invariant=True)
