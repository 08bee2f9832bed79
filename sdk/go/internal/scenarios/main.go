// The driver of the scenarios in sdk/scenarios.md: it plays them by name against a cluster.
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"pixiu"
)

const patience = 60 * time.Second // of one condition

// play is one scenario under way.
type play struct {
	ctx    context.Context
	target string
	seed   uint64
	lines  *bufio.Scanner
	ends   []func()
}

var scenarios = map[string]func(*play) error{}

// ask has the harness do something, and returns what it says.
func (p *play) ask(words ...any) (string, error) {
	text := strings.TrimSuffix(fmt.Sprintln(words...), "\n")
	fmt.Println("ask", text)
	if !p.lines.Scan() {
		return "", errors.New("the harness is gone")
	}
	verb, rest, _ := strings.Cut(p.lines.Text(), " ")
	if verb != "done" {
		return "", fmt.Errorf("%s: %s", text, rest)
	}
	return rest, nil
}

// do is ask of which only the success counts.
func (p *play) do(words ...any) error {
	_, err := p.ask(words...)
	return err
}

func (p *play) later(end func() error) { p.ends = append(p.ends, func() { _ = end() }) }

func (p *play) client(options pixiu.Options) (*pixiu.Client, error) {
	px, err := pixiu.ConnectWith(p.ctx, p.target, options)
	if err == nil {
		p.later(px.Close)
	}
	return px, err
}

// topic is the name of a durable topic of this play.
func (p *play) topic() string { return fmt.Sprintf("s%d-topic", p.seed) }

func (p *play) run(name string) (err error) {
	ctx, cancel := context.WithTimeout(p.ctx, 3*patience)
	defer cancel()
	p.ctx = ctx
	defer func() {
		for at := len(p.ends) - 1; at >= 0; at-- {
			p.ends[at]()
		}
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("%v", panicked)
		}
	}()
	return scenarios[name](p)
}

// expect says what is wrong when a condition does not hold.
func expect(holds bool, format string, values ...any) error {
	if holds {
		return nil
	}
	return fmt.Errorf(format, values...)
}

// kindOf checks the kind of an error.
func kindOf(err, kind error) error {
	return expect(errors.Is(err, kind), "%v is not %v", err, kind)
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "--names" {
		for name := range scenarios {
			fmt.Println(name)
		}
		return
	}
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: scenarios TARGET, or --names")
		os.Exit(2)
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) != 3 || words[0] != "play" {
			fmt.Fprintln(os.Stderr, "not understood:", lines.Text())
			os.Exit(2)
		}
		seed, err := strconv.ParseUint(words[2], 10, 62)
		if err != nil || scenarios[words[1]] == nil {
			fmt.Println("failed", words[1], "the driver does not know it")
			continue
		}
		p := &play{ctx: context.Background(), target: os.Args[1], seed: seed, lines: lines}
		if err := p.run(words[1]); err != nil {
			fmt.Println("failed", words[1], strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			fmt.Println("ok", words[1])
		}
	}
}
