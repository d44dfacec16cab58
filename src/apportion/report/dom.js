"use strict";
// Elements and numbers. Text only ever enters the page through text nodes and attribute values: there is no
// innerHTML here, and the page's policy (require-trusted-types-for) would refuse one.

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const fill = (node, ...children) => {
  node.replaceChildren();
  return build(node, null, children);
};
const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// Numbers as typeset: a real minus sign, – where there is none.
function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(digits).replace("-", "−");
}
const signed = (value, digits = 2) =>
  value === null || value === undefined ? "–" : (value >= 0 ? "+" : "") + number(value, digits);
// Short for axes and errors, whatever the size: 0.53, 1,240, 3e−8.
function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3) return value.toExponential(0).replaceAll("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en").replace("-", "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const MARK = { correct: "✓", wrong: "✗", abstain: "?", partial: "◐" };
// Verdict by shape and word as well as by colour.
const verdict = (name) => el("span", { class: `verdict ${name}`, title: name }, MARK[name] || "·");
