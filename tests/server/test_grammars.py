"""Grammars: compiled where they do no harm, for every kind of tokenizer, and refused in words."""

import json
import random
import re

import jsonschema
import pytest
from tokenizers import Tokenizer

from ropewalk.model.tokenizers.gguf_vocab import tokenizer_from_gguf
from ropewalk.model.tokenizers.hf import HfTokenizer
from ropewalk.model.tokenizers.numbers import NumberTokenizer
from ropewalk.model.tokenizers.spm import SpmModel, SpmTokenizer
from ropewalk.server.errors import FormFailed, InvalidField
from ropewalk.server.openai.body import read_body
from ropewalk.server.openai.schemas import CompletionBody
from ropewalk.server.structured import compiler
from ropewalk.server.structured.grammar import MAX_TEXT, Grammar, Kind
from ropewalk.server.structured.vocabulary import vocabulary_of
from tests.model.tokenizers.hf_samples import byte_level, llama
from tests.model.tokenizers.samples import train_spm
from tests.model.tokenizers.test_gguf_vocab import bpe_fields, spm_fields
from tests.server.grammars import Drawing, compiled, follows, grammars_of, random_answer
from tests.server.toy import ByteTokenizer, complete, toy, toy_app

TOKENIZERS = {
    "bytes": ByteTokenizer,
    "tokenizer.json": lambda: HfTokenizer(Tokenizer.from_str(byte_level().to_str()), eos=[1]),
    "tokenizer.json of SentencePiece": lambda: HfTokenizer(llama(), eos=[2]),
    "SentencePiece with bytes": lambda: SpmTokenizer(SpmModel(train_spm("llama"))),
    "SentencePiece in GGUF": lambda: tokenizer_from_gguf(spm_fields("llama")[1]),
    "byte-level in GGUF": lambda: tokenizer_from_gguf(bpe_fields(byte_level(), "gpt-2")),
}


def json_schema(schema, *more):
    return Grammar(Kind.JSON_SCHEMA, json.dumps(schema), *more)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind of person": {"enum": ["naïve", "日本", 'a "quoted" \\ one', 7, None]},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "kind of person", "born"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request):
    tokenizer = TOKENIZERS[request.param]()
    return grammars_of(tokenizer), tokenizer


@pytest.fixture(scope="module")
def bytes_model():
    return grammars_of(ByteTokenizer())


VALIDATOR = jsonschema.Draft202012Validator(PERSON)
SATISFIED = [
    (json_schema(PERSON), lambda text: VALIDATOR.validate(json.loads(text))),
    (
        Grammar(Kind.REGEX, r"^[a-cé]{2,5}(/\d+)?"),
        lambda text: re.fullmatch(r"[a-cé]{2,5}(/\d+)?", text)[0],
    ),
    (Grammar(Kind.CHOICE, json.dumps(["yes", 'no, "never" \\ at all', "日本\n", "\x7f"])), None),
    (
        Grammar(Kind.LARK, 'start: A B?\nA: "x"+\nB: "yé"'),
        lambda text: re.fullmatch("x+(yé)?", text)[0],
    ),
    (
        Grammar(Kind.GBNF, 'root ::= "a" [0-9]+ ("-" "z")?'),
        lambda text: re.fullmatch("a[0-9]+(-z)?", text)[0],
    ),
]


@pytest.mark.parametrize(("grammar", "check"), SATISFIED, ids=[each.kind for each, _ in SATISFIED])
def test_answers_satisfy_their_grammar_with_every_tokenizer(model, grammar, check):
    grammars, tokenizer = model
    start = compiled(grammars, grammar)
    answers = [
        random_answer(start, tokenizer, random.Random(seed), force=10 * (seed % 2))
        for seed in range(20)
    ]
    done = [answer for answer in answers if answer is not None]
    assert len(done) > 5
    for answer in done:
        if check is None:
            assert answer in json.loads(grammar.text)
        else:
            check(answer)


def test_any_object_is_an_object(bytes_model):
    start = compiled(bytes_model, Grammar(Kind.JSON_OBJECT))
    done = [random_answer(start, ByteTokenizer(), random.Random(seed)) for seed in range(20)]
    assert all(type(json.loads(each)) is dict for each in done if each is not None)
    assert any(done)


def test_drawn_schemas(bytes_model):
    done = 0
    for seed in range(30):
        schema = Drawing(seed).schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        start = compiled(bytes_model, json_schema(schema))
        for walk in range(3):
            answer = random_answer(start, ByteTokenizer(), random.Random(walk), force=walk)
            if answer is not None:
                done += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
    assert done > 40


def test_json_has_no_more_than_a_space_or_an_indented_line_between_its_parts(bytes_model):
    def spaces(grammar):
        start = compiled(bytes_model, grammar)
        made = [random_answer(start, ByteTokenizer(), random.Random(seed)) for seed in range(40)]
        return {found for each in made if each for found in re.findall(r"\s+", each)}

    schema = '{"type": "array", "items": {"const": 1}, "maxItems": 3}'
    usual = spaces(Grammar(Kind.JSON_SCHEMA, schema))
    assert usual and all(re.fullmatch(r" |\n[ \t]{0,32}", each) for each in usual)
    assert spaces(Grammar(Kind.JSON_SCHEMA, schema, "")) == set()
    assert spaces(Grammar(Kind.JSON_SCHEMA, schema, "\t")) == {"\t"}


ONE = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
CLOSED = [
    (ONE, '{"a": 1'),
    ({"$ref": "#/$defs/named", "$defs": {"named": ONE}}, '{"a": 1'),
    ({"type": "array", "items": ONE}, '[{"a": 1'),
    ({"anyOf": [{"type": "null"}, ONE]}, '{"a": 1'),
    ({"allOf": [{"$ref": "#/$defs/named"}], "$defs": {"named": ONE}}, '{"a": 1'),
    ({"properties": {"inner": ONE}, "type": "object"}, '{"inner": {"a": 1'),
]
OPEN = [
    {**ONE, "additionalProperties": True},
    {**ONE, "patternProperties": {"^b": {}}},
    {**ONE, "required": ["a", "b"]},
    {"allOf": [ONE, {"properties": {"b": {}}, "required": ["b"]}]},
    {**ONE, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}]},
    {**ONE, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}, "required": ["b"]}}},
    {"type": "object"},
    {"$ref": "#/$defs/one", "allOf": [{"properties": {"b": {}}}], "$defs": {"one": ONE}},
    {"properties": {"a": {}}, "const": {"a": 1, "b": 2}},
    {"$ref": "#/$defs/one", "minProperties": 2, "$defs": {"one": ONE}},
]


@pytest.mark.parametrize(("schema", "text"), CLOSED)
def test_an_object_has_the_properties_that_its_schema_names(bytes_model, schema, text):
    start = compiled(bytes_model, json_schema(schema))
    assert follows(start, ByteTokenizer(), text + "}")
    assert not follows(start, ByteTokenizer(), text + ",")


@pytest.mark.parametrize("schema", OPEN)
def test_an_object_may_have_others_where_its_schema_speaks_of_them(bytes_model, schema):
    start = compiled(bytes_model, json_schema(schema))
    assert follows(start, ByteTokenizer(), '{"a": 1, "b": 2')


def test_formats_that_the_library_does_not_know_are_annotations(bytes_model):
    """Wherever they stand; but names and values that look like them are what they are."""
    own = {"type": "string", "format": "uuid4"}
    schema = {
        "$defs": {"own": own},
        "properties": {
            "format": own,
            "a": {"anyOf": [{"$ref": "#/$defs/own"}, {"type": "integer", "format": "int64"}]},
            "b": {"const": {"format": "uuid4"}},
            "c": {"type": "string", "format": "date"},
        },
        "required": ["format", "a", "b", "c"],
    }
    start = compiled(bytes_model, json_schema(schema))
    text = '{"format": "x", "a": 7, "b": {"format": "uuid4"}, "c": "2026-11-27"}'
    assert follows(start, ByteTokenizer(), text)
    assert not follows(start, ByteTokenizer(), text.replace("2026-11-27", "x"))


def test_a_form_that_is_slow_to_follow_is_the_clients_fault(bytes_model, monkeypatch):
    matcher = compiled(bytes_model, Grammar(Kind.REGEX, "ab")).begin()
    monkeypatch.setattr("ropewalk.server.structured.matcher.PATIENCE", -1.0)
    with pytest.raises(FormFailed, match="takes too long to follow; simplify it") as failed:
        matcher.advance(ByteTokenizer().encode("a", bos=False)[0], 0)
    assert failed.value.status == 400


def chain(rule, link, count, last):
    return "\n".join([rule, *(link.format(i, i + 1) for i in range(count)), last])


HOSTILE = {
    "too long": Grammar(Kind.REGEX, "a" * (MAX_TEXT + 1)),
    "not JSON": Grammar(Kind.JSON_SCHEMA, "{"),
    "deep schema": Grammar(Kind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
    "false": Grammar(Kind.JSON_SCHEMA, "false"),
    "unknown keyword": Grammar(Kind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
    "from elsewhere": Grammar(Kind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/schema"}'),
    "file": Grammar(Kind.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}'),
    "loop": json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "many properties": json_schema({"properties": {f"p{i}": {} for i in range(9000)}}),
    "multiples": Grammar(Kind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 999983}'),
    "many cases": json_schema(
        {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]}
    ),
    "no regex": Grammar(Kind.REGEX, "("),
    "deep regex": Grammar(Kind.REGEX, "(" * 50000 + "a" + ")" * 50000),
    "long repetition": Grammar(Kind.REGEX, "((a{1000}){1000}){1000}"),
    "deep lark": Grammar(Kind.LARK, "start: " + "(" * 20000 + '"a"' + ")" * 20000),
    "doubling rules": Grammar(Kind.LARK, chain("start: r0", "r{0}: r{1} r{1}", 40, 'r40: "a"')),
    "doubling terms": Grammar(Kind.LARK, chain("start: R0", "R{0}: R{1} R{1}", 40, 'R40: "a"')),
    "deep gbnf": Grammar(Kind.GBNF, "root ::= " + "(" * 20000 + '"a"' + ")" * 20000),
    "nothing": Grammar(Kind.REGEX, ""),
    "no options": Grammar(Kind.JSON_SCHEMA, '{"x-guidance": 5}'),
    "nothing at all": Grammar(Kind.LARK, "start: start"),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_a_grammar_that_cannot_be_followed_is_refused_with_a_reason(bytes_model, grammar):
    with pytest.raises(InvalidField, match=r"^response_format cannot be followed: .+; ") as refusal:
        compiled(bytes_model, grammar)
    assert refusal.value.status == 400 and refusal.value.quotes
    assert "ended with status" not in refusal.value.message
    assert len(refusal.value.message) < 400 and "\n" not in refusal.value.message
    assert compiled(bytes_model, Grammar(Kind.REGEX, "a+"))  # others are still compiled


def test_of_lark_a_refusal_names_the_place_and_leaves_out_the_rest(bytes_model):
    text = 'start: a b\na: "a"\nb: %json {"type": "numeral"}\n'
    with pytest.raises(InvalidField, match=r": Invalid type: numeral \(in line 3\); "):
        compiled(bytes_model, Grammar(Kind.LARK, text))
    with pytest.raises(InvalidField, match=r": Invalid type: numeral \(in the reply\); "):
        compiled(bytes_model, Grammar(Kind.LARK, text, places={3: "the reply"}))


def test_what_was_compiled_is_kept_by_its_text(bytes_model):
    first = compiled(bytes_model, Grammar(Kind.REGEX, "ab"))
    assert compiled(bytes_model, Grammar(Kind.REGEX, "ab", param="guided_regex")) is first
    assert compiled(bytes_model, Grammar(Kind.LARK, "ab: /ab/\nstart: ab")) is not first


def test_of_long_grammars_few_are_kept(bytes_model, monkeypatch):
    monkeypatch.setattr(compiler, "KEPT_TEXT", 100)
    long, other, short = (Grammar(Kind.REGEX, each) for each in ("a" * 60, "b" * 60, "c" * 30))
    first = [compiled(bytes_model, each) for each in (long, other, short)]
    again = [compiled(bytes_model, each) for each in (short, other, long)]
    assert [old is new for old, new in zip(first[::-1], again, strict=True)] == [True, True, False]


def test_tokens_that_the_tokenizer_cannot_write_again_are_still_found():
    """Forced text becomes the tokens that the tokenizer makes of it, if these are that text."""
    sentence = SpmTokenizer(SpmModel(train_spm("llama")))
    vocabulary = vocabulary_of(sentence, sentence.vocab_size, {2})
    for text in ("rope", " rope", "日本", "\n\x02 ", "</s>"):
        tokens = vocabulary(text.encode())
        assert b"".join(vocabulary.tokens[token] for token in tokens) == text.encode()


def test_a_model_whose_answers_never_end():
    tokenizer = NumberTokenizer(40)
    start = compiled(grammars_of(tokenizer, frozenset()), Grammar(Kind.REGEX, "( 1|2| 3)+ 4"))
    answers = [random_answer(start, tokenizer, random.Random(seed)) for seed in range(9)]
    assert all(re.fullmatch("( 1|2| 3)+ 4", answer) for answer in answers)


def asked(**fields):
    return read_body(CompletionBody, {"prompt": "x", **fields}).grammar


SCHEMA = {"type": "object", "properties": {"z": {}, "a": {}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": None}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": {"json": None}}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(Kind.JSON_OBJECT)),
        # Properties in the order sent.
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, json_schema(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, Grammar(Kind.JSON_SCHEMA, '{"type": "null"}')),
        ({"guided_json": True}, Grammar(Kind.JSON_SCHEMA, "true")),
        ({"guided_regex": "a+"}, Grammar(Kind.REGEX, "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar(Kind.CHOICE, '["a", "b"]')),
        ({"guided_grammar": "root ::= x"}, Grammar(Kind.GBNF, "root ::= x")),
        ({"guided_grammar": "start: /a/"}, Grammar(Kind.LARK, "start: /a/")),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, json_schema(SCHEMA, " ?")),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            json_schema(SCHEMA, ""),
        ),
        ({"structured_outputs": {"json_object": True}}, Grammar(Kind.JSON_OBJECT)),
        (
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            Grammar(Kind.JSON_OBJECT, "", ""),
        ),
        (
            {"structured_outputs": {"json": "{}"}, "guided_whitespace_pattern": " "},
            Grammar(Kind.JSON_SCHEMA, "{}", " "),
        ),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar(Kind.GBNF, "root ::= x")),
    ],
)
def test_what_fields_ask_for(fields, grammar):
    assert asked(**fields) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": NAMED}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"a": "x" * (MAX_TEXT + 1)}}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"pattern": "x"}}, "structured_outputs.pattern"),
    ],
)
def test_fields_that_ask_for_nothing_possible(fields, param):
    with pytest.raises(InvalidField) as refused:
        asked(**fields)
    assert refused.value.param == param and "xxx" not in refused.value.message


def test_an_encoder_decoder_says_that_it_cannot():
    app = toy_app(served=[toy(grammars=None)])
    answer = complete(app, guided_regex="a")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"
    assert complete(app, response_format={"type": "text"}).status_code == 200
