"""The generic model tests of transformers, of models that are converted as soon as they are constructed.

They are in transformers' source distribution, of which TRANSFORMERS_SDIST names the unpacked folder:

    pip install '.[test-all]'
    pip download --no-binary :all: --no-deps transformers==$(pip show transformers | awk '/^Version/ {print $2}')
    tar xzf transformers-*.tar.gz
    TRANSFORMERS_SDIST=$PWD/transformers-5.23.0 python -m pytest -m integration tests/test_transformers_suite.py
"""

import contextlib
import functools
import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
from packages import import_torchvision

import layernorm_ext

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.integration]

SDIST = os.environ.get("TRANSFORMERS_SDIST")
if not SDIST:
    pytest.skip("TRANSFORMERS_SDIST names no unpacked source distribution of transformers", allow_module_level=True)
import_torchvision()
transformers = pytest.importorskip("transformers")
pytest.importorskip("parameterized")


def import_common_tests():
    """Import tests/test_modeling_common.py, with empty mixins for the two of its modules that the sdist lacks."""
    name = "transformers_sdist_tests"
    package = types.ModuleType(name)
    package.__path__ = [str(Path(SDIST) / "tests")]
    sys.modules[name] = package
    for module, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parent = module.partition(".")[0]
        sys.modules[f"{name}.{parent}"] = types.ModuleType(f"{name}.{parent}")
        sys.modules[f"{name}.{module}"] = types.ModuleType(f"{name}.{module}")
        setattr(sys.modules[f"{name}.{module}"], mixin, type(mixin, (), {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.mark, "_config", None)  # else pytest refuses markers that are not ours
        return importlib.import_module(f"{name}.test_modeling_common")


common = import_common_tests()


@contextlib.contextmanager
def converting():
    """Convert every model at the end of its constructor; yield the number of layers that were replaced so far."""
    replaced = []
    post_init = transformers.PreTrainedModel.post_init

    @functools.wraps(post_init)
    def post_init_and_convert(model):
        post_init(model)
        replaced.extend(layernorm_ext.convert(model).replaced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "post_init", post_init_and_convert)
        yield replaced


def with_conversion(test):
    """Run a test of a converted model; skip it if it fails for the original, too."""

    @functools.wraps(test)
    def run(self, *args, **kwargs):
        try:
            with converting():
                return test(self, *args, **kwargs)
        except unittest.SkipTest:
            raise
        except Exception:
            self.setUp()
            try:
                test(self, *args, **kwargs)
            except Exception as original:
                raise unittest.SkipTest(f"fails without conversion, too: {original}"[:200]) from None
            raise

    return run


class Tester:
    """The facts that the generic tests ask for: a model's configuration, its inputs and their sizes."""

    batch_size = 3
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 2
    num_choices = 4
    pad_token_id = 0
    num_masks = 2
    is_training = True

    def __init__(self, config, inputs):
        self.get_config, self.inputs = config, inputs
        if hasattr(config(), "image_size"):
            self.image_size, self.patch_size = config().image_size, config().patch_size
            self.mask_length = (self.image_size // self.patch_size) ** 2
            self.seq_length = self.encoder_seq_length = self.key_length = 1 + self.mask_length

    def prepare_config_and_inputs_for_common(self):
        torch.manual_seed(0)
        return self.get_config(), self.inputs(self)

    def prepare_config_and_inputs_for_model_class(self, model_class):
        return self.prepare_config_and_inputs_for_common()

    def tokens(self):
        return torch.randint(3, 50, (self.batch_size, self.seq_length))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VOCABULARY = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def masked(tester):
    return {"input_ids": tester.tokens(), "attention_mask": torch.ones(tester.batch_size, tester.seq_length).long()}


def unmasked(tester):
    return {"input_ids": tester.tokens()}


def both(tester):
    return {**masked(tester), "decoder_input_ids": tester.tokens()}


def pictures(tester):
    return {"pixel_values": torch.randn(tester.batch_size, 3, 16, 16)}


# The class of the configuration and its options; the inputs; the classes; what else the generic tests ask for.
MODELS = {
    "T5": (
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        | VOCABULARY,
        both,
        ["T5Model", "T5ForConditionalGeneration"],
        {"is_encoder_decoder": True},
    ),
    "Mamba": (
        "MambaConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | VOCABULARY,
        unmasked,
        ["MambaModel", "MambaForCausalLM"],
        {"has_attentions": False},
    ),
    "Bert": (
        "BertConfig",
        {"max_position_embeddings": 32} | SIZES | VOCABULARY,
        masked,
        ["BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification"],
        {},
    ),
    "Llama": (
        "LlamaConfig",
        {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32} | SIZES | VOCABULARY,
        masked,
        ["LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"],
        {},
    ),
    "ViT": (
        "ViTConfig",
        {"image_size": 16, "patch_size": 8, "encoder_stride": 8} | SIZES,
        pictures,
        ["ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"],
        {"test_resize_embeddings": False, "test_model_get_set_embeddings": None},  # of images, which have none
    ),
}


def suite(name):
    """Return the generic tests of a model as a class."""
    config, options, inputs, classes, attributes = MODELS[name]

    @contextlib.contextmanager
    def sub_test(self, *args, **kwargs):  # pytest's keeps failures to itself
        with contextlib.suppress(unittest.SkipTest):
            yield

    def set_up(self):
        self.model_tester = Tester(lambda: getattr(transformers, config)(**options), inputs)

    attributes = {"all_model_classes": tuple(getattr(transformers, each) for each in classes), **attributes}
    cls = type(
        f"Test{name}",
        (common.ModelTesterMixin, unittest.TestCase),
        {"setUp": set_up, "subTest": sub_test, **attributes},
    )
    for test in [each for each in dir(cls) if each.startswith("test_") and callable(getattr(cls, each))]:
        setattr(cls, test, with_conversion(getattr(cls, test)))
    return cls


for _name in MODELS:
    globals()[f"Test{_name}"] = suite(_name)


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_converted(name):
    """Else the tests above would show nothing."""
    config, options, _, classes, _ = MODELS[name]
    with converting() as replaced:
        getattr(transformers, classes[0])(getattr(transformers, config)(**options))
    assert len(replaced) >= 3
