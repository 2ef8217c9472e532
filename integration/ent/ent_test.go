// Package ent tests that a store takes in ent's transactions. The test has ent generate a client
// into a temporary module, and runs testdata/app_test.go there.
package ent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"entgo.io/ent"
	"entgo.io/ent/entc/gen"
	"entgo.io/ent/entc/load"
	"entgo.io/ent/schema/field"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// app is the path of the temporary module. It is below ratelimit, whose internal packages its
// test imports.
const app = "github.com/pgratelimit/ratelimit/integration/ent/app"

// Message is a message that somebody sent.
type Message struct{ ent.Schema }

// Fields are the columns of its table.
func (Message) Fields() []ent.Field { return []ent.Field{field.String("sender")} }

func TestEnt(t *testing.T) {
	pgtest.Long(t)
	dir := t.TempDir()
	if err := generate(filepath.Join(dir, "ent")); err != nil {
		t.Fatal(err)
	}
	test, err := os.ReadFile("testdata/app_test.go")
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	work := fmt.Sprintf("go 1.26.0\n\nuse (\n\t.\n\t%q\n)\n\nreplace github.com/pgratelimit/ratelimit => %q\n", here, filepath.Join(here, "../.."))
	for name, text := range map[string]string{
		"app_test.go": string(test), "go.mod": "module " + app + "\n\ngo 1.26.0\n", "go.work": work,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", ".")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// generate has ent generate the client of messages, with the feature sql/execquery, which has
// transactions run SQL.
func generate(dir string) error {
	text, err := load.MarshalSchema(Message{})
	if err != nil {
		return err
	}
	message, err := load.UnmarshalSchema(text)
	if err != nil {
		return err
	}
	storage, err := gen.NewStorage("sql")
	if err != nil {
		return err
	}
	graph, err := gen.NewGraph(&gen.Config{
		Package: app + "/ent", Schema: app + "/ent/schema", Target: dir,
		Storage: storage, Features: []gen.Feature{gen.FeatureExecQuery},
	}, message)
	if err != nil {
		return err
	}
	return graph.Gen()
}
