// What two runs were trained with, and in what they differ.

function settingsOfTwo() {
  const names = Object.keys(results.settings);
  at("settings").hidden = names.length < 2;
  if (at("settings").hidden) return;
  at("settings-names").replaceChildren(...names.map(value => make("option", {value})));
  const two = results.pairs
    .toSorted((a, b) => isMine(b.base) - isMine(a.base))
    .map(({base, canon}) => [models[base].model, models[canon].model])
    .find(two => two.every(name => Object.hasOwn(results.settings, name)));
  [at("settings-a").value, at("settings-b").value] = two ?? names.slice(0, 2);

  const settingsOf = name => (Object.hasOwn(results.settings, name) ? results.settings[name] : null);
  const text = value =>
    value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const rows = () => {
    const [a, b] = ["settings-a", "settings-b"].map(id => settingsOf(at(id).value));
    if (!a || !b) return null;
    const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].filter(key => key !== "model");
    return keys
      .map(key => [key, text(a[key]), text(b[key])])
      .filter(([, one, other]) => at("settings-all").checked || one !== other);
  };
  const show = () => {
    const found = rows(),
      two = [at("settings-a").value, at("settings-b").value];
    at("settings-note").textContent =
      found === null ? "Choose two names from the list." : found.length ? "" : "They do not differ.";
    table(
      at("settings-table"),
      ["setting", ...two],
      (found ?? []).map(([key, one, other]) => [
        make("th", {scope: "row"}, key),
        ...[one, other].map(value => make("td", one !== other ? {class: "differs"} : {}, value)),
      ]),
    );
    at("settings-table").hidden = !found?.length;
  };
  exported("settings", () => [["setting", at("settings-a").value, at("settings-b").value], ...(rows() ?? [])]);
  ["settings-a", "settings-b", "settings-all"].forEach(id => at(id).addEventListener("input", show));
  show();
}
