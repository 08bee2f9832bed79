import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["build/", "src/gen/", "node_modules/", "eslint.config.js"] },
  ...tseslint.configs.strictTypeChecked,
  ...tseslint.configs.stylisticTypeChecked,
  {
    languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } },
    rules: {
      // Numbers and IDs stand in errors and names.
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true, allowNever: true }],
      // It takes a field that other code sets during an await for unchanged.
      "@typescript-eslint/no-unnecessary-condition": "off",
      // `as T` beside the rule against `!`.
      "@typescript-eslint/non-nullable-type-assertion-style": "off",
    },
  },
);
