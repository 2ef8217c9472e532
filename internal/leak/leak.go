// Package leak is for tests that nothing exported shows keys of limits to logs.
package leak

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// Key is what the values of a test have for a key.
const Key = "sk-live-6GvD0kLm2Qh8"

// Check prints, logs and encodes a value of every type that the package in the directory
// exports, and looks for Key. values has them by the types' names, several in a slice of
// any; a type that is missing there is an error, and so is a name that is none. Interfaces
// and functions are no values. asked are types whose JSON is to have the key.
func Check(t *testing.T, dir string, values map[string]any, asked ...string) {
	t.Helper()
	types := exported(t, dir)
	for name := range types {
		if _, ok := values[name]; !ok {
			t.Errorf("type %s has no value here: say what it looks like with leak.Key in it", name)
		}
	}
	for name, value := range values {
		if !types[name] {
			t.Errorf("there is no exported type %s", name)
		}
		all, several := value.([]any)
		if !several {
			all = []any{value}
		}
		json := true
		for _, a := range asked {
			json = json && a != name
		}
		for _, v := range all {
			for way, text := range texts(v, json) {
				if shows(text, Key) {
					t.Errorf("%s shows the key in %s: %.300s", name, way, text)
				}
			}
		}
	}
}

// exported returns the types that the package exports, but for interfaces and functions.
func exported(t *testing.T, dir string) map[string]bool {
	t.Helper()
	types := map[string]bool{}
	for spec := range declared(t, dir) {
		s, ok := spec.(*ast.TypeSpec)
		if !ok || !s.Name.IsExported() {
			continue
		}
		switch s.Type.(type) {
		case *ast.InterfaceType, *ast.FuncType:
		default:
			types[s.Name.Name] = true
		}
	}
	return types
}

// declared returns the types, variables and constants of the package, but for its tests, each with
// its keyword.
func declared(t *testing.T, dir string) map[ast.Spec]token.Token {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	specs := map[ast.Spec]token.Token{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			if gen, ok := decl.(*ast.GenDecl); ok {
				for _, spec := range gen.Specs {
					specs[spec] = gen.Tok
				}
			}
		}
	}
	return specs
}

// texts returns v as it is logged, printed and, if so wanted, encoded: by itself, in a
// slice, and in a struct.
func texts(v any, encoded bool) map[string]string {
	slice := reflect.MakeSlice(reflect.SliceOf(reflect.TypeOf(v)), 1, 1)
	slice.Index(0).Set(reflect.ValueOf(v))
	texts := map[string]string{}
	for shape, v := range map[string]any{"itself": v, "a slice": slice.Interface(), "a struct": struct{ V any }{v}} {
		var text, asJSON bytes.Buffer
		slog.New(slog.NewTextHandler(&text, nil)).Info("", "v", v)
		slog.New(slog.NewJSONHandler(&asJSON, nil)).Info("", "v", v)
		texts["slog text of "+shape] = text.String()
		if encoded || shape == "itself" {
			texts["slog JSON of "+shape] = asJSON.String()
		}
		texts["%v of "+shape] = fmt.Sprintf("%v", v)
		texts["%+v of "+shape] = fmt.Sprintf("%+v", v)
		if encoded {
			out, err := json.Marshal(v)
			texts["JSON of "+shape] = fmt.Sprintf("%s %v", out, err)
		}
	}
	return texts
}

// encodedRun is what may be base64.
var encodedRun = regexp.MustCompile(`[A-Za-z0-9+/_-]{16,}`)

// shows reports whether the key is in the text: as it is, as a list of bytes, or in
// base64, wherever that begins.
func shows(text, key string) bool {
	if strings.Contains(text, key) || strings.Contains(text, strings.Trim(fmt.Sprint([]byte(key)), "[]")) {
		return true
	}
	for _, run := range encodedRun.FindAllString(strings.NewReplacer("+", "-", "/", "_").Replace(text), -1) {
		for from := range 4 {
			part := run[min(from, len(run)):]
			decoded, err := base64.RawURLEncoding.DecodeString(part[:len(part)/4*4])
			if err == nil && (bytes.Contains(decoded, []byte(key)) || shows(string(decoded), key)) {
				return true
			}
		}
	}
	return false
}
