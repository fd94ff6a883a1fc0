"""tests/book_page.py LLM BROWSER: opens docs/index.html and docs/talk/index.html in a headless
browser. Prints what failed, then "N passed, N failed"."""
import os, sys

from browser import browser
from serve_util import TOP, check, finish

READY = "document.readyState == 'complete'"
RESOURCES = ("performance.getEntriesByType('resource').map(x => x.name)"
             ".filter(x => !x.startsWith('file:'))")
# what is wider than the window, unless it scrolls by itself
WIDE = """[...document.querySelectorAll('body *')].filter(x => {
  const r = x.getBoundingClientRect();
  return r.right > innerWidth + 1 && !x.closest('pre, table');
}).map(x => x.outerHTML.slice(0, 80))"""
# load all pictures; gives those that do not load
PICTURES = """Promise.all([...document.images].map(x => { x.loading = 'eager';
  return x.decode().then(() => null, () => x.src); })).then(x => x.filter(y => y))"""
COPIED = "navigator.clipboard.writeText = x => { window.copied = x; return Promise.resolve(); }"
COLOUR = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(22, 24, 29)"


def open_page(b, name):
    b.open("file://%s/docs/%s" % (TOP, name))
    check(name + " opens", b.until(READY + " && location.href.includes('%s')" % name))
    b.run(COPIED)


def width(b, name):
    for w, h in ((1280, 720), (390, 844)):
        b.size(w, h)
        b.until("innerWidth == %d" % w)
        check("%s: no horizontal scrolling at %d" % (name, w),
              b.run("document.documentElement.scrollWidth <= innerWidth") and not b.run(WIDE),
              b.run(WIDE))


def test_book(b):
    name = "index.html"
    b.size(1280, 720)
    open_page(b, name)
    bad = b.run(PICTURES)
    check("every picture loads", not bad and b.run("document.images.length >= 20"), bad)
    pages = [x for x in os.listdir(os.path.join(TOP, "docs")) if x.endswith(".md")]
    links = b.run("[...document.querySelectorAll('nav li a')].map(x => x.hash.slice(1))")
    check("all pages are in the contents", {x[:-3] for x in pages} <= set(links), links)
    numbers = [int(x[:2]) for x in links if x[:2].isdigit()]
    check("numbered pages are in order", numbers == sorted(numbers) and len(numbers) >= 20, numbers)
    dead = b.run("[...document.querySelectorAll('a[href^=\"#\"]')].map(x => x.hash.slice(1))"
                 ".filter(x => !document.getElementById(x))")
    check("no link to a place is dead", not dead, dead)
    b.run("document.querySelector('nav a[href=\"#08-paged\"]').click()")
    check("a link of the contents leads to its page", b.until(
        "Math.abs(document.getElementById('08-paged').getBoundingClientRect().top) < 60"))
    check("and is marked", b.until(
        "document.querySelector('nav [aria-current]').hash == '#08-paged'"))
    b.run("setTheme('light')")
    check("light", b.run(COLOUR) == LIGHT, b.run(COLOUR))
    b.shot("book-light")
    b.run("$('theme').click()")
    check("a click: dark", b.run(COLOUR) == DARK, b.run(COLOUR))
    b.shot("book-dark")
    b.run("$('theme').click()")
    check("another: light", b.run(COLOUR) == LIGHT)
    b.run("document.querySelector('[id=\"03-kv\"] pre.run button').click()")
    check("a command is copied", b.until("window.copied === './llm lesson kv'"), b.run("copied"))
    b.run("[...document.querySelectorAll('#command pre')].find(x => x.textContent.includes('curl'))"
          ".querySelectorAll('button')[1].click()")
    check("one command of several is copied", b.until(
        r"/^curl .*\\\n *-d .*'$/.test(copied)"), b.run("copied"))
    check("C is coloured", b.run(
        "[...document.querySelectorAll('[id=\"03-kv\"] .language-c .k')]"
        ".some(x => x.innerText == 'int')"))
    width(b, name)
    check("a phone: the contents are a menu", not b.run("$('contents').open"))
    b.run("$('contents').open = true")
    b.shot("book-phone-menu")
    b.run("document.querySelector('nav a[href=\"#04-attention\"]').click()")
    check("which closes after a choice", not b.run("$('contents').open"))
    check("and the page's title is below it", b.until(
        "document.querySelector('[id=\"04-attention\"] h1').getBoundingClientRect().top >= "
        "document.querySelector('nav').getBoundingClientRect().bottom"))
    b.shot("book-phone")
    check("nothing comes from elsewhere", not b.run(RESOURCES), b.run(RESOURCES))


def test_talk(b):
    name = "talk/index.html"
    b.size(1280, 720)
    open_page(b, name)
    bad = b.run(PICTURES)
    check("the slides' pictures load", not bad and b.run("document.images.length >= 6"), bad)
    n = b.run("slides.length")
    check("there are slides", n > 20, n)
    check("each slide has notes", b.run("slides.every(x => x.querySelector('blockquote'))"))
    tall = b.run("slides.filter(x => x.offsetHeight > innerHeight + 1).map(x => x.innerText)")
    check("each slide fits in 1280 x 720", not tall, tall)
    cut = b.run("[...document.querySelectorAll('pre')].filter(x => x.scrollWidth > x.clientWidth)"
                ".map(x => x.innerText)")
    check("nothing is cut off", not cut, cut)
    for i in range(n if os.environ.get("SHOTS") else 0):
        b.run("show(%d)" % i)
        b.until("now() == %d" % i)
        b.shot("talk-%02d" % (i + 1))
    b.run("show(0)")
    b.until("now() == 0")
    for key, slide in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", n - 1),
                       ("ArrowRight", n - 1), ("Home", 0)):
        b.run("dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))" % key)
        check("%s: slide %d" % (key, slide + 1), b.until(
            "now() == %d && location.hash == '#%d'" % (slide, slide + 1)), b.run("now()"))
    b.run("show(6)")
    b.key("n")
    check("n shows the notes, and keeps the slide", b.until(
        "now() == 6 && slides[6].querySelector('blockquote').offsetHeight > 0"))
    b.shot("talk-notes")
    b.key("n")
    check("n hides them", b.until("slides[6].querySelector('blockquote').offsetHeight == 0"))
    before = b.run(COLOUR)
    b.key("t")
    check("t changes the theme", {before, b.run(COLOUR)} == {LIGHT, DARK}, before, b.run(COLOUR))
    b.shot("talk-theme")
    b.run("document.querySelector('pre button').click()")
    check("a slide's command is copied", b.until("window.copied === 'make demo'"), b.run("copied"))
    check("printed, each slide is one page", b.pages() == n, b.pages(), n)
    width(b, name)
    b.shot("talk-phone")
    check("nothing comes from elsewhere", not b.run(RESOURCES), b.run(RESOURCES))


def main():
    b = browser(sys.argv[2])
    try:
        test_book(b)
        test_talk(b)
        check("the console shows no error", not b.errors, b.errors)
    finally:
        b.end()
    return finish()


sys.exit(main())
