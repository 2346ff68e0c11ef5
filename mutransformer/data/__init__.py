"""The data room: documents come in, batches of token windows go out."""
