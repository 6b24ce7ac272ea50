"""The one door to private Lightning: every private name of Lightning is used in this folder only.

:mod:`.names` lists them. A new Lightning release that moves one breaks this folder and
``tests/test_lightning_door.py``, nothing else; at run time :func:`.names.missing_names` notices and
the recovery stands aside with one warning.
"""
