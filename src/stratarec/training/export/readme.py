"""README.txt of an export: everything needed to score without StrataRec.

`tests/serving/stranger.py` is written from this page alone, and a test holds its scores to those of `predict`.
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

5. THE NETWORK, float32 throughout ("precision" bf16: it was trained and is run by StrataRec with torch.autocast, so
   scores differ by up to 0.004). Weights by name in network.safetensors. linear(x, n) = x n.weight^T + n.bias;
   mlp(x, n): for each linear layer n.k (n.0, then as many as there are, by number) x = linear(x, n.k), without bias
   where it has none; where n.K with K = k + 1 has a running_mean, x = (x - n.K.running_mean) /
   sqrt(n.K.running_var + 1e-5) * n.K.weight + n.K.bias; then x = relu(x).
   V = POOLED as P vectors, and behind them a vector for each of "sequences" (number s, "model"."history"), made of its
   rows R [L, D] and of t, the vector in POOLED of the feature "of":
   target_attention   n = poolings.s: weight of row r = linear(mlp([t, r, t - r, t * r], n.score), n.out);
                      the sum of weight * r
   transformer        n = poolings.s: R + n.position[L - 1, ..., 0] (the last row gets place 0), through "layers" blocks
                      n.blocks.k:  R += linear(attention(layer_norm(R, before)), join);
                      R += linear(gelu(linear(layer_norm(R, between), feed.0)), feed.2);  then the mean of the rows.
                      attention: query, key, value are the thirds of linear(., project), each in "heads" heads side by
                      side, softmax(q k^T / sqrt(D / heads)) v. layer_norm: epsilon 1e-5. gelu: by erf.
   An empty history gives zeros.
   dlrm    f = mlp(DENSE, score.bottom), the first of the vectors, V behind it (no f where F is 0); products i . j of
           all pairs j < i, in the order (1,0) (2,0) (2,1) (3,0) ...;
           logit = linear(mlp([f, products], score.top), score.out). With "interaction" cat, [f, V] instead
   dcnv2   x = [DENSE, V]; c = x, then for each layer k: c = x * linear(c, score.cross.layers.k) + c, where with a
           "low_rank" the layer is linear(c score.cross.layers.k.0.weight^T, score.cross.layers.k.1).
           "structure" parallel: logit = linear([c, mlp(x, score.deep)], score.out); stacked:
           linear(mlp(c, score.deep), score.out)
   The other models take FIELDS: for each column x_i of DENSE the vector x_i * column i of score.fields.numbers.weight,
   then V. Rows of fm, wide_deep, deepfm and xdeepfm have D + 1 numbers: FIRST is the sum of the last ones of FIELDS, E
   what is left of FIELDS; elsewhere E = FIELDS. flat() is side by side; PAIRS the sum of E_i . E_j of all j < i.
   lr         logit = b + the sum of FIELDS;  b = score.out.bias
   fm         logit = b + FIRST + PAIRS
   wide_deep  logit = b + FIRST + mlp(flat(E), score.deep) . score.out.linear.weight
   deepfm     as wide_deep, + PAIRS
   xdeepfm    logit = b + FIRST + [CIN, mlp(flat(E), score.deep)] . score.out.linear.weight. CIN: m = E, then for each
              layer k: m = score.cin.layers.k.weight times all products m_i * E_j, in the order (0,0) (0,1) ... (1,0);
              CIN has the sums over D of the m of every layer
   autoint    f = E, then for each layer k, n = score.attention.k: q, key, v = f n.project.0/1/2.weight^T, each in
              "attention_heads" heads side by side, softmax(q key^T) v (where "scaled", over the root of a head's width
              inside), + f n.residual.weight^T; "layer_norm": layer_norm(., n.norm); f = relu of it.
              logit = linear([flat(f), mlp(flat(E), score.deep)], score.out), without the mlp where "deep_mlp" is empty
   masknet    h = flat(E), or where "field_norm" flat(layer_norm(E, score.norm)); block k of x, n = score.blocks.k:
              relu(layer_norm(linear(linear(relu(linear(flat(E), n.mask.0)), n.mask.2) * x, n.hidden), n.norm)).
              "structure" serial: x is h, then the block before; logit = linear(the last, score.out). parallel: x is h;
              logit = linear(mlp(all blocks side by side, score.deep), score.out)
   finalmlp   x, y = mlp(g * flat(E), score.streams.0/1.deep); g = 1 without "gate_features", else of the vectors of
              its features side by side 2 sigmoid(linear(mlp(., n.gate.0), n.gate.1)), n = score.streams.0/1. Where
              "gate_vectors" is own, FIELDS have 2 D numbers: E the first half, what gates take the second. With both
              cut into "fusion_heads" parts: logit = b + [x, y] . score.out.linear.weight + sum of x_k W_k y_k, the W_k
              being score.forms.weight one after another, by rows
   din        logit = linear(mlp(flat(E), score.deep), score.out)
   ensemble   K "members"; a row of V has for each member D + 1 numbers, the last one its w. Of each x_i of DENSE, e =
              row i of score.numbers.encode.edges: z_q = clamp((x_i - e_q) / (e_(q+1) - e_q), 0, 1), 0 where the edges
              are equal; its vectors are relu(z score.numbers.weight[i] + score.numbers.bias[i]), D for each member.
              Member k: h = those and its part of V side by side; for each score.layers.j: h = h weight[k] + bias[k],
              then relu but for the last; logit_k = h + the sum of its w + clamp(DENSE, -8, 8) column k of
              score.numbers.first. logit = b + the mean of the logit_k
   Another "kind" is a model of another package, which says what it is.
   A model with "towers", "embedding_dims", several "labels", or sequences that the log gave is not told here: take
   Scorer, or network.onnx of `stratarec export --onnx`.
   Where there is a "calibration", the logit x becomes, of its K "knots" k, "values" v and two "slopes" s, in float32:
   v[0] + s[0] (x - k[0]) below k[0]; v[i] + (x - k[i]) (v[i+1] - v[i]) / (k[i+1] - k[i]) from k[i] to k[i+1];
   v[K-1] + s[1] (x - k[K-1]) from k[K-1] on.
   The score is 1 / (1 + exp(-logit)).
   Sums are taken in another order elsewhere: expect the scores of `stratarec predict` to 2e-6 of themselves.
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
