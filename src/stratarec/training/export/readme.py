"""README.txt of an export: its files, and how to encode features and read rows without StrataRec.

The network itself is scored by StrataRec or as ONNX. `tests/serving/stranger.py` encodes features from this page alone.
"""

from __future__ import annotations

from textwrap import fill

from stratarec.kernels.codec.kinds import KINDS

_PAGE = """\
A click model that StrataRec exported. In Python:

    scorer = stratarec.Scorer.open("this directory")
    scores = scorer.score(frame)

`frame` has a column for each feature that manifest.json names under "schema", with values as the log had them; a
history is a list of the values that came before, oldest first.

manifest.json              how the model is built; bytes and hash (XXH3_128) of the other files
network.safetensors        weights of the network
tables.safetensors         a table of rows for each vocabulary
vocabulary/                value, id (the row of its table) and count; values that are not there share the first rows;
                           an id behind those without a value is nobody's

These files are data. Scorer checks all of them, and runs nothing that is in them. What follows is for whoever scores
without it. Names in quotes are fields of manifest.json; B samples, D "model"."embedding_dim".

1. DENSE [B, F], a column for each of "schema"."dense", in order, in float64:
   missing (null, NaN) -> 0 at the end. "transform" log1p: sign(x) * log1p(|x|); none: x. Where "standardize" is true:
   (x - mean) / deviation, of "moments" by the feature's name. Then cut to the range of float32, and float32.

2. IDS of each of "schema"."sparse". Its vocabulary is "vocabulary", or where that is empty that of the feature "of", or
   its own name. A value becomes that vocabulary's "type" (String: integers in decimal digits). Its id stands
   beside it in the file "path", whose first "tail_buckets" rows have no value; any other value has the id
       hash mod tail_buckets
   where hash is, of text, XXH3_64 with seed 0 of its bytes in UTF-8, and of an integer (64 bits, two's complement)
       z = v + 0x5DEECE66D;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;
       z ^ z >> 31;
   all of it modulo 2^64. By "kind":
   single   one value; where it is missing, no id.
   multi    a list, or text that is split at "separator", without empty parts and without spaces, tabs and ends of
            lines around a part; text without "separator" is a list as JSON or Python writes it, whose numbers stay as
            written. Nulls are left out, then the first "max_length" are taken.
            With "weights", each value has the number at its place in the list of that column.
   history  values of the feature "of" in earlier rows of the same user ("user") whose label is positive, strictly
            earlier ("time"), in order of time and then of the log, without nulls; the last "max_length", oldest first.
   sequence a list like that of multi, in order, oldest first; with those "beside" it, which are as long, it has an
            event at each place. Events that lack a value in one of them are left out; the last "max_length".

3. ROWS of a table, by id, from tables.safetensors. "codec" fp32: <table> is [rows, D] float32. Otherwise <table> is
   [rows, record bytes] uint8, little-endian, a record being
@CODECS@
   with scale and offset of the type "parameters" (fp16 or fp32), and the weight offset + code * scale in float32. Where
   "float32_rows" is not 0, row @rows/<table>[k] is @float32/<table>[k] instead of what its record gives.

4. POOLED [B, P * D]: side by side, for each of "pooled", the sum, or the mean, of the rows of its ids; zeros without.
   With weights w it is the sum of w * row, or that divided by the sum of w; zeros where that is 0.
   Each of "sequences" is not pooled here: its rows, oldest first, go to the network.

5. THE NETWORK: network.onnx of `stratarec export --onnx`, for any ONNX runtime. Its inputs are DENSE, POOLED, and rows
   and mask of each of "sequences"; its output is the probability.
"""

_INPUTS = """\
                           (dense [B, F], pooled [B, P * D], then rows [B, L, D] and mask [B, L] of each of "sequences",
                           padded at the end) -> probabilities [B]
"""

_PROGRAM = f"""
program.pt2                the network as torch.export wrote it:
{_INPUTS}
OPENING program.pt2 RUNS CODE. torch.export.load unpickles parts of it, and a pickle can run any code that its author
put there. Open it only if you made this export yourself, or would run a program from the person who did. Scorer never
opens it.
"""

_ONNX = f"""
network.onnx               the network as ONNX; inputs dense, pooled, rows_0, mask_0, rows_1, ..., output score:
{_INPUTS}"""


def page(*, program: bool, onnx: bool) -> str:
    """Return the text, with sections on the optional files."""
    told = [
        fill(f"       {kind.name:<12} {kind.about}", 120, subsequent_indent=" " * 20)
        for kind in KINDS.values()
        if kind.about
    ]
    return _PAGE.replace("@CODECS@", "\n".join(told)) + (_PROGRAM if program else "") + (_ONNX if onnx else "")
