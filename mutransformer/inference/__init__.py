"""What a trained model is for: sampling from it, writing it in others' formats, starting a run from such files."""
