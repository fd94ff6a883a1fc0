"""tests/serve_page.py LLM BROWSER: drives the server's page in a headless browser. Prints what
failed, then "N passed, N failed"."""
import os, sys

from browser import browser
from serve_util import Server, check, finish

OPTIONS = ["--log", os.devnull]


USED = "count.reduce((a, x) => a + (x > 0), 0)"
OVERLAP = """(() => {
  const wide = document.documentElement.scrollWidth > innerWidth + 1;
  const parts = [...document.querySelectorAll('header, main > section')].map(x => [x.id || 'header',
      x.getBoundingClientRect()]);
  const bad = wide ? ['wider than the window: ' + document.documentElement.scrollWidth] : [];
  parts.forEach(([a, p], i) => parts.slice(i + 1).forEach(([b, q]) => {
    if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
      bad.push(a + ' overlaps ' + b);
  }));
  for (const x of document.querySelectorAll('section')) for (const y of x.children) {
    const p = x.getBoundingClientRect(), q = y.getBoundingClientRect();
    if (q.bottom > p.bottom + 1 || q.right > p.right + 1) bad.push((y.id || y.className) + ' leaves ' + x.id);
  }
  return bad;
})()"""


def open_page(b, s):
    b.open(s.url + "/")
    return b.until("typeof state !== 'undefined' && state && state.blocks_total > 0")


def test_page(b, s):
    b.size(1440, 900)
    check("the page gets the engine's state", open_page(b, s))
    b.until("!count.some(x => x)")
    b.run("control({pace: 60})")
    b.run("$('prompt').value = 'Once upon a time'; $('prompt').focus()")
    b.key("Enter")
    check("a text streams in", b.until("$('text').textContent.length > 60"))
    first = b.run("$('text').textContent.length")
    check("it grows", b.until("$('text').textContent.length > %d" % (first + 60)))
    check("the block map changes", b.until(USED + " >= 2"))
    check("a sequence is listed", b.until("document.querySelectorAll('#list .chip').length == 1"))
    check("steps are drawn", b.until("steps.length > 20"))
    b.run("control({pace: 0})")
    check("it ends", b.until("!running && !count.some(x => x)"))
    b.run("document.activeElement.blur()")
    b.run("control({pace: 20})")
    b.key("1")
    check("a crowd starts, and shares blocks", b.until("state.running > 3 && state.blocks_shared > 5"))
    check("more wait than run", b.until("state.waiting > 0"))
    for width, height in ((1440, 900), (1024, 768), (390, 844)):
        b.size(width, height)
        for theme in ("light", "dark"):
            b.run("setTheme('%s'); new Promise(r => requestAnimationFrame(() => setTimeout(r, 120)))"
                  % theme)
            bad = b.run(OVERLAP)
            check("nothing overlaps at %dx%d" % (width, height), not bad, bad)
            b.shot("%dx%d-%s" % (width, height, theme))
    b.size(1440, 900)
    b.run("control({pace: 0})")
    check("the crowd runs to its end", b.until("/all 24 have ended/.test($('say').textContent)", 60))
    check("blocks are kept", b.until("!count.some(x => x) && kept.some(x => x)"))
    b.run("$('text').focus()")
    b.key("p")
    check("pause", b.until("state.paused"))
    b.key("3")
    check("they wait while it is paused", b.until("state.waiting >= 30"))
    before = b.run("steps.length ? steps[steps.length - 1][0] : 0")
    b.key("s")
    check("a single step", b.until("steps[steps.length - 1][0] == %d" % (before + 1)))
    b.run("document.querySelector('[data-setting=cache_tokens]').value = String(state.context);"
          "document.querySelector('[data-setting=cache_tokens]').onchange()")
    check("other settings restart the engine", b.until("state.settings.cache_tokens == 1024 && "
                                                       "state.blocks_total == 64"))
    check("its requests are told", b.until("/restarted/.test($('say').textContent)"),
          b.run("$('say').textContent"))
    b.key("p")
    check("resume", b.until("!state.paused"))
    b.run("control({pace: 60})")
    b.key("3")
    check("sequences are preempted", b.until("state.preemptions > 0"))
    b.shot("1440x900-preempted")
    b.key("0")
    check("a crowd is cancelled", b.until("state.running == 0 && state.waiting == 0"))
    b.run("control({pace: 0, settings: {prefix_cache: false, cache_tokens: 0, block_size: 8}})")
    check("a switch follows", b.until(
        "!document.querySelector('[data-setting=prefix_cache]').checked && state.blocks_total == 2048"))
    b.run("$('tab-chat').click(); $('prompt').value = 'Who are you?'; send()")
    check("a conversation", b.until("!running && turns.length == 2 && turns[1].content.length > 3"))
    b.key("2")
    check("long among short", b.until("/all 4 have ended|all 12 have ended/.test($('say').textContent)",
                                      60), b.run("$('say').textContent"))
    b.shot("1440x900-conversation")
    check("the console shows no error", not b.errors, b.errors)


def test_key(b):
    s = Server("--api-key", "secret", *OPTIONS, threads=1)
    b.open(s.url + "/")
    check("it asks for the key", b.until("$('ask') && $('ask').open"))
    b.run("$('key').value = 'secret'; $('ask').close()")
    check("and works with it", b.until("state && state.blocks_total > 0"))
    check("an orderly end", s.end() == 0)


def main():
    b = browser(sys.argv[2])
    s = Server(*OPTIONS, threads=1)
    try:
        test_page(b, s)
        test_key(b)
    finally:
        b.end()
    check("an orderly end of the server", s.end() == 0)
    return finish()


sys.exit(main())
