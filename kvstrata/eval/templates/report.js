(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("tokens"), card = document.getElementById("card");
  const tokens = [...box.querySelectorAll("i")];
  const pick = document.getElementById("setting"), byTag = document.getElementById("by-tag"), byTier = document.getElementById("by-tier");
  const spanOf = new Uint32Array(tokens.length);
  data.spans.forEach((s, k) => spanOf.fill(k, s[0], s[1]));
  tokens.forEach((t, i) => { t.dataset.i = i; });

  const bits = (setting, i) => data.settings[setting].pages[Math.floor(i / data.page)];
  const share = (setting, i) => (data.settings[setting].bytes[bits(setting, i)] ?? 0) / data.page;

  function paint(tier) {
    const setting = +pick.value;
    box.className = tier ? "tier" : "tag";
    byTag.setAttribute("aria-pressed", String(!tier));
    byTier.setAttribute("aria-pressed", String(tier));
    document.getElementById("legend-tag").hidden = tier;
    document.getElementById("legend-tier").hidden = !tier;
    tokens.forEach((t, i) => { t.className = tier ? "t-" + data.tiers[bits(setting, i)] + (i % data.page ? "" : " p") : ""; });
  }

  let on = null;
  function show(token, x, y) {
    if (on) on.classList.remove("on");
    on = token;
    if (!token) { card.hidden = true; return; }
    token.classList.add("on");
    const i = +token.dataset.i, s = data.spans[spanOf[i]], setting = +pick.value;
    const rows = [["position", i + " (page " + Math.floor(i / data.page) + ")"], ["token id", data.ids[i]], ["role", s[2].replace("_", " ")],
      ["modality", s[3]], ["age", s[5] + " (turn " + s[4] + ")"]];
    data.settings.forEach((v, k) => rows.push([v.name, data.tiers[bits(k, i)] + ", " + Math.round(share(k, i)).toLocaleString("en") + " bytes" + (k === setting ? " ◂" : "")]));
    const code = document.createElement("code"), list = document.createElement("dl");
    code.textContent = JSON.stringify(token.textContent.replace("↵\n", "\n")).slice(1, -1);
    for (const [name, value] of rows) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = name; dd.textContent = value; list.append(dt, dd);
    }
    card.replaceChildren(code, list);
    card.hidden = false;
    const w = card.offsetWidth, h = card.offsetHeight;
    card.style.left = Math.max(8, Math.min(x + 16, innerWidth - w - 8)) + "px";
    card.style.top = (y + 20 + h > innerHeight ? Math.max(8, y - h - 14) : y + 20) + "px";
  }
  box.addEventListener("pointermove", (e) => show(e.target.closest("i"), e.clientX, e.clientY));
  box.addEventListener("pointerleave", () => show(null));
  box.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    if (!step) return;
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, (on ? +on.dataset.i : -1) + step))];
    next.scrollIntoView({ block: "nearest" });
    const r = next.getBoundingClientRect();
    show(next, r.left, r.bottom - 12);
    e.preventDefault();
  });
  byTag.addEventListener("click", () => paint(false));
  byTier.addEventListener("click", () => paint(true));
  pick.addEventListener("change", () => paint(true));
  // #tier and #tier=2 open the page in that view; #token=120 with that token's details
  const tier = location.hash.match(/tier(?:=(\d+))?/), token = location.hash.match(/token=(\d+)/);
  if (tier && tier[1] && +tier[1] < data.settings.length) pick.value = tier[1];
  paint(Boolean(tier));
  if (token && tokens[+token[1]]) {
    box.scrollTop = tokens[+token[1]].offsetTop - box.clientHeight / 2;
    const r = tokens[+token[1]].getBoundingClientRect();
    show(tokens[+token[1]], r.left, r.bottom);
  }
})();
