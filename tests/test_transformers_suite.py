"""The generic model tests of transformers, run on models that are converted by the end of their constructor.

transformers' source distribution contains the tests. TRANSFORMERS_SDIST names its unpacked folder:

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
    """Import tests/test_modeling_common.py, with empty stand-ins for two mixins that the distribution lacks."""

    def add_module(name, **attributes):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)

    package = "transformers_sdist_tests"
    add_module(package, __path__=[str(Path(SDIST) / "tests")])
    add_module(f"{package}.exporters")
    add_module(f"{package}.exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
    add_module(f"{package}.generation")
    add_module(f"{package}.generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.mark, "_config", None)  # lets transformers use its own markers
        return importlib.import_module(f"{package}.test_modeling_common")


common = import_common_tests()


@contextlib.contextmanager
def convert_new_models():
    """Convert every model at the end of its constructor; yield the list of the layers replaced so far."""
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
    """Run a test with converted models; skip it if it fails with the original models as well."""

    @functools.wraps(test)
    def run(self, *args, **kwargs):
        try:
            with convert_new_models():
                return test(self, *args, **kwargs)
        except unittest.SkipTest:
            raise
        except Exception:
            self.setUp()
            try:
                test(self, *args, **kwargs)
            except Exception as error:
                raise unittest.SkipTest(f"fails without conversion, too: {error}"[:200]) from None
            raise

    return run


BATCH, TOKENS = 3, 7
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0} | TEXT
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | TEXT
BERT = {"max_position_embeddings": 32} | SIZES | TEXT
LLAMA = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32} | SIZES | TEXT
VIT = {"image_size": 16, "patch_size": 8, "encoder_stride": 8} | SIZES
IDS, MASKED, BOTH = ["input_ids"], ["input_ids", "attention_mask"], ["input_ids", "attention_mask", "decoder_input_ids"]
NO_EMBEDDINGS = {"test_resize_embeddings": False, "test_model_get_set_embeddings": None}  # images have no tokens
# Name -> options of the configuration, inputs, suffixes of the model classes, attributes of the test class.
MODELS = {
    "T5": (T5, BOTH, ["Model", "ForConditionalGeneration"], {"is_encoder_decoder": True}),
    "Mamba": (MAMBA, IDS, ["Model", "ForCausalLM"], {"has_attentions": False}),
    "Bert": (BERT, MASKED, ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"], {}),
    "Llama": (LLAMA, MASKED, ["Model", "ForCausalLM", "ForSequenceClassification"], {}),
    "ViT": (VIT, ["pixel_values"], ["Model", "ForImageClassification", "ForMaskedImageModeling"], NO_EMBEDDINGS),
}


def make_config(name):
    return getattr(transformers, f"{name}Config")(**MODELS[name][0])


def model_tester(name):
    """Return the object from which the generic tests read configuration, inputs and sizes."""

    def prepare_config_and_inputs_for_common():
        torch.manual_seed(0)
        inputs = {
            "input_ids": torch.randint(3, 50, (BATCH, TOKENS)),
            "attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
            "decoder_input_ids": torch.randint(3, 50, (BATCH, TOKENS)),
            "pixel_values": torch.randn(BATCH, 3, 16, 16),
        }
        return make_config(name), {key: inputs[key] for key in MODELS[name][1]}

    tester = types.SimpleNamespace(
        batch_size=BATCH,
        seq_length=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_choices=4,
        pad_token_id=0,
        is_training=True,
        get_config=lambda: make_config(name),
        prepare_config_and_inputs_for_common=prepare_config_and_inputs_for_common,
    )
    if name == "ViT":  # four patches and a class token
        vars(tester).update(image_size=16, patch_size=8, seq_length=5, num_masks=2, mask_length=4)
    return tester


def generic_tests(name):
    """Return a test class with the generic tests of a model."""

    @contextlib.contextmanager
    def sub_test(self, *args, **kwargs):  # pytest's subTest would hide failures from with_conversion
        with contextlib.suppress(unittest.SkipTest):
            yield

    attributes = MODELS[name][3] | {
        "all_model_classes": tuple(getattr(transformers, name + suffix) for suffix in MODELS[name][2]),
        "setUp": lambda self: setattr(self, "model_tester", model_tester(name)),
        "subTest": sub_test,
    }
    cls = type(f"Test{name}", (common.ModelTesterMixin, unittest.TestCase), attributes)
    for test in dir(cls):
        if test.startswith("test_") and callable(getattr(cls, test)):
            setattr(cls, test, with_conversion(getattr(cls, test)))
    return cls


TestT5, TestMamba, TestBert, TestLlama, TestViT = map(generic_tests, MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_new_models_are_converted(name):
    """Without this, the generic tests might pass on models that were never converted."""
    with convert_new_models() as replaced:
        getattr(transformers, f"{name}Model")(make_config(name))
    assert len(replaced) >= 3
