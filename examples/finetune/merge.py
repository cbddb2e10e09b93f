"""Write a folder of transformers from what lora.py trained, LoRA added to the weights.

    autopipe checkpoint convert checkpoints -o trained.safetensors
    python merge.py trained.safetensors FOLDER

BASE, LORA_RANK and ALPHA are those of the training.
"""

import shutil
import sys
from pathlib import Path

import lora
from safetensors.torch import load_model


def main(trained: str, folder: str) -> None:
    model = lora.model()
    load_model(model, trained)
    lora.without_lora(model).save_pretrained(folder)
    for pattern in ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja"):
        for path in lora.BASE.glob(pattern):
            shutil.copy(path, folder)
    print(Path(folder))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python merge.py TRAINED.safetensors FOLDER")
    main(*sys.argv[1:])
