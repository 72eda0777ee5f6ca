from types import SimpleNamespace

from ropewalk.load_tests.micro import mask_cost


def test_every_engine_has_every_role(monkeypatch, capsys):
    """With engines that compute nothing: what they are given to hold tells their role."""

    begun = SimpleNamespace(_state=None, mask=lambda: None, _ends=())

    async def compile_(grammar):
        return SimpleNamespace(begin=lambda: begun)

    grammars = SimpleNamespace(compile=compile_)
    tokenizer = SimpleNamespace(encode=lambda text, bos: [1])
    served = SimpleNamespace(grammars=grammars, tokenizer=tokenizer)
    names = iter("abc")
    roles = []

    def loaded(*_, **__):
        engine = SimpleNamespace(name=next(names), step=None)
        return SimpleNamespace(engine=engine, served=served)

    def begin(engine, prompt, params, held):
        roles.append((len(held), engine.name, sum(each is not None for each in held)))

    monkeypatch.setattr(mask_cost, "loaded", loaded)
    monkeypatch.setattr(mask_cost, "Unforced", lambda *_: "a matcher")
    monkeypatch.setattr(mask_cost, "begin", begin)
    monkeypatch.setattr(mask_cost, "end", lambda engine, count: None)
    monkeypatch.setattr(
        mask_cost, "rounds", lambda calls, count, *_: [dict.fromkeys(calls, 0.001)] * count
    )
    monkeypatch.setattr("sys.argv", ["mask_cost", "--rounds", "9"])
    mask_cost.main()
    of_many = [(engine, held) for count, engine, held in roles if count == 32]
    assert sorted(of_many) == [(engine, held) for engine in "abc" for held in (0, 16, 32)]
    assert "half held +0.00%" in capsys.readouterr().out
