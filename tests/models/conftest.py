"""Makes the training code of models/m3-nano importable by plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "m3-nano" / "train"))
