"use strict";
// Everything a model wrote goes into the page by textContent: it can show anything and do nothing.
const data = JSON.parse(document.getElementById("data").textContent);
const loaded = {};
function traces(problems) { Object.assign(loaded, problems); }

function make(tag, text, kind) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

// The text with reflection words marked, and with what steering moved in another colour.
function marked(answer) {
  const box = make("pre");
  const spots = answer.marks.map(([start, end, delta]) => ({ start, end, delta }));
  const characters = Array.from(answer.text); // places are counted in code points
  const places = [0];
  for (const c of characters) places.push(places[places.length - 1] + c.length);
  for (const s of spots) { s.start = places[s.start]; s.end = places[s.end]; }
  for (const m of answer.text.matchAll(new RegExp(data.reflection, "g"))) {
    const start = m.index, end = m.index + m[0].length;
    if (!spots.some(s => s.start < end && start < s.end)) spots.push({ start, end });
  }
  spots.sort((a, b) => a.start - b.start);
  let done = 0;
  for (const s of spots) {
    if (s.start < done) continue;
    box.append(answer.text.slice(done, s.start));
    const node = make("mark", answer.text.slice(s.start, s.end), s.delta > 0 ? "up" : s.delta < 0 ? "down" : "");
    if (s.delta !== undefined && s.delta !== null) node.title = "offset " + s.delta.toFixed(3);
    box.append(node);
    done = s.end;
  }
  box.append(answer.text.slice(done));
  return box;
}

function curve(name, values) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  const low = Math.min(...values), high = Math.max(...values), line = document.createElementNS(space, "polyline");
  svg.setAttribute("viewBox", "0 0 300 60");
  line.setAttribute("class", "wave");
  line.setAttribute("points", values.map((v, i) =>
    (300 * i / (values.length - 1)).toFixed(1) + "," + (55 - 50 * (v - low) / (high - low || 1)).toFixed(1)).join(" "));
  svg.append(line);
  const box = make("figure");
  box.append(make("div", name + ", " + low.toPrecision(3) + " to " + high.toPrecision(3), "soft"), svg);
  return box;
}

function show(problem, place) {
  place.replaceChildren();
  const body = problem.file ? loaded[problem.task + "/" + problem.id] : problem;
  if (!body) {
    place.append(make("p", "Loading traces/" + problem.file + " …", "soft"));
    const script = document.createElement("script");
    script.src = "traces/" + problem.file;
    script.onload = () => show(problem, place);
    script.onerror = () => place.replaceChildren(make("p", "These answers are in traces/" + problem.file + " beside the report, which is not there."));
    document.head.append(script);
    return;
  }
  for (const message of body.messages) {
    place.append(make("div", message.role, "soft"), make("pre", message.content));
  }
  place.append(make("p", "Right answer: " + problem.gold + (problem.level === null ? "" : ", level " + problem.level)));
  const samples = Math.max(...body.answers.map(a => a.sample)) + 1;
  for (let sample = 0; sample < samples; sample++) {
    place.append(make("h3", "Sample " + sample));
    const row = make("div", undefined, "answers");
    for (const method of data.methods) {
      const answer = body.answers.find(a => a.method === method && a.sample === sample);
      if (!answer) continue;
      const box = make("div");
      box.append(make("h4", method));
      const given = answer.answer === null ? "no answer" : answer.answer;
      box.append(make("div", (answer.right ? "right: " : "wrong: ") + given, answer.right ? "right" : "wrong"));
      box.append(make("div", answer.tokens + " tokens" + (answer.finish === "length" ? ", cut off" : "") + ", graded by " + answer.how, "soft"));
      box.append(marked(answer));
      for (const [name, values] of Object.entries(answer.curves)) box.append(curve(name, values));
      row.append(box);
    }
    place.append(row);
  }
}

function mean(values) { return values.reduce((a, b) => a + b, 0) / values.length; }

(function browse() {
  const place = document.getElementById("browser"), bar = make("div", undefined, "bar"), body = make("div");
  const filter = make("select"), list = make("select"), word = make("input");
  word.placeholder = "text of the problem or its id";
  for (const [value, text] of [["all", "all problems"], ["differ", "methods differ"], ["wrong", "never right"]]) {
    const option = make("option", text);
    option.value = value;
    filter.append(option);
  }
  let found = [];
  function refill() {
    const sought = word.value.toLowerCase();
    found = data.problems.filter(p => {
      const rates = data.methods.map(m => p.right[m] || []).filter(r => r.length).map(mean);
      if (filter.value === "differ" && new Set(rates).size < 2) return false;
      if (filter.value === "wrong" && rates.some(r => r > 0)) return false;
      return (p.id + " " + (p.messages || []).map(m => m.content).join(" ")).toLowerCase().includes(sought);
    });
    list.replaceChildren(...found.map((p, i) => {
      const rates = data.methods.filter(m => (p.right[m] || []).length).map(m => Math.round(100 * mean(p.right[m])) + " %");
      const option = make("option", p.task + " " + p.id + ": " + rates.join(", "));
      option.value = i;
      return option;
    }));
    if (found.length) show(found[0], body); else body.replaceChildren(make("p", "No such problem."));
  }
  list.onchange = () => show(found[list.value], body);
  filter.onchange = refill;
  word.oninput = refill;
  bar.append(filter, list, word);
  place.replaceChildren(bar, body);
  refill();
})();
