"use strict";
// Keeps a page that `polyphily watch` serves up to date. It asks for the state every second, and for
// the page if that has changed, and replaces what differs. Scroll place, choices, sorted tables and
// colours stay as the reader has set them.

(() => {
const EVERY = 1000, HIDDEN = 10000;
const strip = document.querySelector(".live");
let shown = document.documentElement.dataset.version;
document.documentElement.style.overflowAnchor = "none"; // `keepingPlace` does it, in every browser

// The state of the runs --------------------------------------------------------------------------

function stripRow({ name, state, words, round, rounds }) {
  const row = html("div", { class: state }, html("span", {}, html("b", {}, name), words));
  if (rounds) row.append(html("progress", { max: rounds, value: round, "aria-label": `${name}: rounds` }));
  return row;
}

function showState(state) {
  const rows = state.runs.length ? state.runs.map(stripRow) : [stripRow({ name: "waiting", state: "starting", words: state.words })];
  if (state.trouble) rows.push(stripRow({ name: "not up to date", state: "stopped", words: state.trouble }));
  const next = html("div", {}, ...rows);
  if (next.innerHTML !== strip.innerHTML) strip.replaceChildren(...rows);
}

function showGone() {
  const words = "polyphily watch has ended; this page stays as it is.";
  strip.replaceChildren(stripRow({ name: "not connected", state: "gone", words }));
}

// The page ---------------------------------------------------------------------------------------

// Tables as the server wrote them: the reader may have sorted those on the page.
const written = new WeakMap();
const source = (element) => written.get(element) ?? element.outerHTML;
for (const table of document.querySelectorAll(".items > .table")) written.set(table, table.outerHTML);

// Keep the section that the reader looks at, the last that begins in the upper third, in its place.
function keepingPlace(change) {
  const begun = [...document.querySelectorAll("main > section")].filter((s) => s.getBoundingClientRect().top < innerHeight / 3);
  const anchor = scrollY > 0 && begun.at(-1);
  const before = anchor && anchor.getBoundingClientRect().top;
  change();
  if (!anchor || !anchor.isConnected) return;
  const moved = anchor.getBoundingClientRect().top - before;
  if (Math.abs(moved) >= 1) scrollBy({ top: moved, behavior: "instant" });
}

function replaceTable(old, next) {
  const heading = old.querySelector("th[aria-sort]"), left = old.querySelector(".scroll").scrollLeft;
  written.set(next, next.outerHTML);
  old.replaceWith(next);
  listen(next);
  const same = heading && next.querySelector("tr").cells[heading.cellIndex];
  if (same?.hasAttribute("data-sort")) {
    sortBy(same);
    if (same.getAttribute("aria-sort") !== heading.getAttribute("aria-sort")) sortBy(same);
  }
  next.querySelector(".scroll").scrollLeft = left;
}

// A figure that the pointer is on is drawn once the pointer has left it.
function drawSoon(figure) {
  if (!figure.place.matches(":hover")) return figure.draw();
  figure.place.addEventListener("pointerleave", () => figure.draw(), { once: true });
}

function updateFigure(figure, element) {
  const data = figures[figure.element.dataset.figure];
  figure.element.querySelector("figcaption").textContent = element.querySelector("figcaption").textContent;
  figure.element.querySelector("h3").textContent = element.querySelector("h3").textContent;
  if (JSON.stringify(data) === JSON.stringify(figure.data)) return;
  const frames = figure.panel.frames, last = frames && figure.number === frames.length - 1;
  const choices = JSON.stringify(data.choices) !== JSON.stringify(figure.data.choices);
  if (choices) {
    const before = Object.fromEntries(figure.data.choices.map((choice, i) => [choice.name, figure.chosen[i]]));
    figure.chosen = data.choices.map(({ name, options }) => (options.includes(before[name]) ? before[name] : options[0]));
  }
  figure.data = data;
  if (choices) figure.showControls();
  if (last) figure.number = null; // the slider was at the last round, and goes with it
  figure.updateSlider();
  drawSoon(figure);
}

function key(element, i) {
  return element.dataset.figure ?? `${element.className} ${i}`;
}

function updateItems(place, next) {
  const old = new Map([...place.children].map((element, i) => [key(element, i), element]));
  [...next.children].forEach((element, i) => {
    const name = key(element, i), own = old.get(name);
    old.delete(name);
    if (!own) {
      place.insertBefore(element, place.children[i] ?? null);
      appear(element);
    } else if (element.matches("figure")) {
      updateFigure(drawn.find((figure) => figure.element === own), element);
    } else if (source(own) !== element.outerHTML) {
      if (element.matches(".table")) replaceTable(own, element);
      else own.replaceWith(element);
    }
  });
  for (const element of old.values()) disappear(element);
}

function appear(element) {
  for (const figure of [element, ...element.querySelectorAll("figure[data-figure]")].filter((e) => e.matches("figure[data-figure]"))) {
    const made = new Figure(figure);
    drawn.push(made);
    made.draw();
  }
  for (const table of [element, ...element.querySelectorAll(".table")].filter((e) => e.matches(".table"))) written.set(table, table.outerHTML);
  listen(element);
}

function disappear(element) {
  element.remove();
  drawn.splice(0, drawn.length, ...drawn.filter((figure) => figure.element.isConnected));
}

function updateSection(own, next) {
  for (const selector of [".lead", ".points"]) {
    const [old, made] = [own.querySelector(selector), next.querySelector(selector)];
    if (old?.outerHTML === made?.outerHTML) continue;
    old?.remove();
    if (made) own.insertBefore(made, own.querySelector(".items"));
  }
  updateItems(own.querySelector(".items"), next.querySelector(".items"));
}

function update(page) {
  document.title = page.title;
  for (const selector of ["h1", ".subtitle", ".facts", "nav .wrap", ".notes", "footer"]) {
    const [old, made] = [document.querySelector(selector), page.querySelector(selector)];
    if (old.innerHTML !== made.innerHTML) old.replaceChildren(...made.childNodes);
  }
  const data = JSON.parse(page.getElementById("figures").textContent);
  for (const name of Object.keys(figures)) delete figures[name];
  Object.assign(figures, data);
  const main = document.querySelector("main"), notes = main.querySelector(":scope > .notes");
  const wanted = [...page.querySelectorAll("main > section")];
  for (const own of main.querySelectorAll(":scope > section")) {
    if (!wanted.some((section) => section.id === own.id)) disappear(own);
  }
  wanted.forEach((section, i) => {
    const own = document.getElementById(section.id);
    if (own) return updateSection(own, section);
    main.insertBefore(section, main.querySelectorAll(":scope > section")[i] ?? notes);
    appear(section);
  });
}

// Asking -----------------------------------------------------------------------------------------

async function look() {
  try {
    const state = await (await fetch("state", { cache: "no-store" })).json();
    keepingPlace(() => showState(state));
    if (state.version !== shown) {
      const text = await (await fetch("./", { cache: "no-store" })).text();
      const page = new DOMParser().parseFromString(text, "text/html");
      keepingPlace(() => update(page));
      shown = page.documentElement.dataset.version;
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch raises TypeError if nobody answers
    showGone();
  } finally {
    clearTimeout(look.timer);
    look.timer = setTimeout(look, document.hidden ? HIDDEN : EVERY);
  }
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
})();
