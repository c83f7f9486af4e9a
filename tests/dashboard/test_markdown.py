"""An answer as the model means it: the Markdown that models write, and nothing that a browser would run."""

from __future__ import annotations

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.dashboard.browsing import needs_chromium
from tests.dashboard.showing import writing

pytestmark = [needs_chromium, pytest.mark.slow]

CODE = '<div class="code"><div><span>{}</span><button class="quiet" type="button">Copy</button></div>{}</div>'
PRE = '<pre tabindex="0" role="region" aria-label="Code"><code>{}</code></pre>'
WRITTEN = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A\n### B #": "<h4>A</h4><h6>B</h6>",
    "**a** and *b*, 2 * 3 * 4": "<p><strong>a</strong> and <em>b</em>, 2 * 3 * 4</p>",
    "**a *b***": "<p><strong>a *b</strong>*</p>",
    "`a*b*` and ``c`d``": "<p><code>a*b*</code> and <code>c`d</code></p>",
    "snake_case_name": "<p>snake_case_name</p>",
    "- a\n- b\n  - c\n\nd": (
        "<ul><li><span>a</span></li><li><span>b</span><ul><li><span>c</span></li></ul></li></ul><p>d</p>"
    ),
    "3. a\n4. b": '<ol start="3"><li><span>a</span></li><li><span>b</span></li></ol>',
    "1. a\n\n2. b": '<ol start="1"><li><span>a</span></li><li><span>b</span></li></ol>',
    "```py\nif a:\n    b\n```\nc": CODE.format("py", PRE.format("if a:\n    b")) + "<p>c</p>",
    "```\nopen": CODE.format("", PRE.format("open")),
    "1. a\n   ```\n   b\n   ```": (
        '<ol start="1"><li><span>a</span>' + CODE.format("", PRE.format("b")) + "</li></ol>"
    ),
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "---": "<hr>",
    "|a|b|\n|-|-|\n|1|2|": (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th>a</th><th>b</th></tr>'
        "</thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>"
    ),
    "<img src=x onerror=alert(1)> [a](javascript:b)": ("<p>&lt;img src=x onerror=alert(1)&gt; [a](javascript:b)</p>"),
    "```<script>\n</code><script>alert(1)</script>\n```": None,
    "> " * 500 + "deep": None,
    "- " * 500 + "deep": None,
    "`" * 2001 + "*" * 2001: None,
}
SHOW = """async (texts) => {
  const { Markdown } = await import("/dashboard/static/markdown.js");
  const whole = (text) => { const one = new Markdown(); one.show(text); return one.element; };
  const grown = (text) => {
    const one = new Markdown();
    for (let end = 0; end <= text.length; end += 1 + Math.floor(text.length / 50)) one.show(text.slice(0, end));
    one.show(text);
    return one.element;
  };
  const foreign = (text) => whole(text).querySelectorAll("script, img, a").length;
  return texts.map((text) => [whole(text).innerHTML, grown(text).innerHTML, foreign(text)]);
}"""


async def test_markdown_becomes_elements_and_text_stays_text(tokenizer: Tokenizer) -> None:
    async with writing("", tokenizer) as visit:
        shown = await visit.page.evaluate(SHOW, list(WRITTEN))
        for (text, expected), (whole, grown, foreign) in zip(WRITTEN.items(), shown, strict=True):
            assert expected in (None, whole), text
            assert grown == whole, "a text that grows ends as it does at once"
            assert foreign == 0
        kept = await visit.page.evaluate(
            """async () => {
              const { Markdown } = await import("/dashboard/static/markdown.js"), one = new Markdown();
              one.show("```\\ncode\\n```\\nafter");
              const first = one.element.firstChild, second = one.element.lastChild;
              one.show("```\\ncode\\n```\\nafter that");
              return [one.element.firstChild === first, one.element.lastChild === second];
            }"""
        )
        assert kept == [True, False], "what does not change stays as it is"
