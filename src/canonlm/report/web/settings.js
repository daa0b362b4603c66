// The settings of two runs, and how they differ.

VIEWS.settings = () => {
  const names = Object.keys(results.settings);
  if (hides("settings", names.length < 2)) return;
  at("settings-names").replaceChildren(...names.map(value => make("option", {value})));
  const two = results.pairs
    .toSorted((a, b) => isMine(b.base) - isMine(a.base))
    .map(({base, canon}) => [models[base].model, models[canon].model])
    .find(two => two.every(name => Object.hasOwn(results.settings, name)));
  [at("settings-a").value, at("settings-b").value] = two ?? names.slice(0, 2);

  const chosen = () => [at("settings-a").value, at("settings-b").value];
  const text = value =>
    value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const rows = () => {
    if (!chosen().every(name => Object.hasOwn(results.settings, name))) return null;
    const [a, b] = chosen().map(name => results.settings[name]);
    const keys = Object.keys({...a, ...b}).filter(key => key !== "model");
    const values = keys.map(key => [key, text(a[key]), text(b[key])]);
    return values.filter(([, one, other]) => at("settings-all").checked || one !== other);
  };
  const show = () => {
    const shown = rows() ?? [];
    const note = rows() === null ? "Choose two names from the list." : "They do not differ.";
    at("settings-note").textContent = shown.length ? "" : note;
    const marks = shown.map(([, one, other]) => one !== other && "best");
    table(at("settings-table"), ["setting", ...chosen()], shown, marks);
    at("settings-table").hidden = shown.length === 0;
  };
  exported("settings", () => [["setting", ...chosen()], ...(rows() ?? [])]);
  ["settings-a", "settings-b", "settings-all"].forEach(id => at(id).addEventListener("input", show));
  show();
};
