"""The techniques. None of them knows another; they meet in `strategy/native/prepare.py`."""
