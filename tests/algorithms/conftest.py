"""Puts tiny_models.py within reach of the tests here."""

import os
import sys

sys.path.append(os.path.dirname(__file__))
